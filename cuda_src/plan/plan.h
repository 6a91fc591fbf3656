// The plan of a pass of a problem on a GPU: its kernels, tiles, numbers of blocks and scratch memory, and the reasons.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "common/problem.h"
#include "cuda_src/jit.h"
#include "cuda_src/plan/scratch.h"
#include "cuda_src/plan/target.h"

namespace jax_flash {

enum class Pass { kForward, kBackward };

// Why no kernels do the problem on any GPU; empty if they do.
std::string CudaRefusal(const Problem& problem);

// No entry of the results depends on an operand: there is nothing to attend to, or nobody to do it.
bool NothingToCompute(const Problem& problem);

// The tensor maps that a kernel takes in addition to Params.
enum class Maps { kNone, kForward, kBackward, kBackwardBias };

// A file of cuda_src/kernels with the configuration and the problem that it is compiled for.
struct PlannedUnit {
  std::string file;
  KernelConfig config;
  Problem problem;
};

struct Launch {
  int unit;           // of Plan::units
  std::string entry;  // name of the kernel
  int64_t blocks;
  int threads;
  bool persistent = false;      // at most one block a multiprocessor: blocks take their tiles in turn
  int cluster = 1;              // blocks of a cluster
  bool dynamic_shared = false;  // as much as the file's jax_flash_shared_bytes says
  Maps maps = Maps::kNone;
  int64_t zero_bytes = 0;  // bytes of scratch memory, from Scratch::taken on, that have to be 0 before
};

// How many blocks there are of it at a time on a GPU with so many multiprocessors: whole clusters.
int64_t BlocksOf(const Launch& launch, int multiprocessors);

// The kernels of a pass that have several candidates for their tiles: the forward, or the backward for dK, dV and dQ;
// the one for dQ alone; the one for dbias.
enum class Part { kMain, kQuery, kBias };
constexpr int kParts = 3;
// The number of the candidate that each part takes.
using Choices = std::array<int, kParts>;

// A unit, and how many candidates for its tiles there are; none without such a part.
struct PlannedPart {
  int unit = -1;  // of Plan::units
  int candidates = 0;
};

struct Plan {
  std::vector<PlannedUnit> units;
  std::vector<Launch> launches;  // one after the other
  std::array<PlannedPart, kParts> parts;
  Scratch scratch;                   // what the launches need
  std::vector<std::string> reasons;  // why it is not otherwise, as sentences
};

// The plan with these candidates, by default the first. CompiledPlan (compiled_plan.h) finds those that the compiler
// has enough registers for. Throws std::invalid_argument if that GPU cannot do it.
Plan MakePlan(const Problem& problem, Pass pass, const Target& target, const Choices& choices = {});

// The units as the compiler takes them, with the source of their score programs.
std::vector<Unit> UnitsOf(const Plan& plan);

// The bytes of scratch memory that are enough for each of these GPUs, whatever candidates are taken; if there are no
// GPUs, for any. 0 if there are no kernels for the problem.
int64_t ScratchBytes(const Problem& problem, Pass pass, const std::vector<Target>& targets);

}  // namespace jax_flash
