// The plan of a pass on a GPU: kernels, tiles, grid sizes and scratch memory, with reasons.
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

enum class Pass { kForward, kBackward, kTangent };

// The reason why no GPU supports the problem; empty if some do.
std::string CudaRefusal(const Problem& problem);

// Do the kernels of a forward read the value from the latent? Otherwise the value is an operand.
bool ReadsLatent(const Problem& problem);

// Are the results independent of the operands, because there are no queries or no keys?
bool NothingToCompute(const Problem& problem);

// The tensor maps that a kernel takes in addition to Params.
enum class Maps { kNone, kForward, kBackward, kBackwardBias, kTangent };

// A file of cuda_src/kernels with the configuration and the problem that it is compiled for.
struct PlannedUnit {
  std::string file;
  KernelConfig config;
  Problem problem;
};

struct Launch {
  int unit;           // index in Plan::units
  std::string entry;  // name of the kernel
  int64_t blocks;     // CTAs, or if `persistent` tiles
  int threads;
  bool persistent = false;      // at most one CTA on each SM; CTAs loop over tiles
  int cluster = 1;              // CTAs in a cluster
  bool dynamic_shared = false;  // the file's jax_flash_shared_bytes defines the size
  Maps maps = Maps::kNone;
  int64_t zero_bytes = 0;  // bytes of scratch memory, from Scratch::tile_counter on, that must be zeroed first
};

// The number of CTAs on a GPU with this number of SMs, in whole clusters.
int64_t BlocksOf(const Launch& launch, int multiprocessors);

// The kernels of a pass whose tiles have several candidates: the forward, or the backward for dK, dV and dQ; the kernel
// for dQ only; the kernel for dbias.
enum class Part { kMain, kQuery, kBias };
constexpr int kParts = 3;
// The index of the chosen candidate of each part.
using Choices = std::array<int, kParts>;

// The unit of a part, and the number of candidates for its tiles. Without the part, -1 and 0.
struct PlannedPart {
  int unit = -1;  // index in Plan::units
  int candidates = 0;
};

struct Plan {
  std::vector<PlannedUnit> units;
  std::vector<Launch> launches;  // in order
  std::array<PlannedPart, kParts> parts;
  Scratch scratch;                   // for all launches
  std::vector<std::string> reasons;  // sentences that explain the choices
};

// The plan with these candidates, by default the first. CompiledPlan (compiled_plan.h) finds candidates that do not
// spill. Throws std::invalid_argument if the GPU does not support the problem.
Plan MakePlan(const Problem& problem, Pass pass, const Target& target, const Choices& choices = {});

// The units for the compiler, with the source of their score programs.
std::vector<Unit> UnitsOf(const Plan& plan);

// The bytes of scratch memory that suffice on each of these GPUs, with any candidates. Without GPUs in the list, they
// suffice on any GPU. 0 if no kernels support the problem.
int64_t ScratchBytes(const Problem& problem, Pass pass, const std::vector<Target>& targets);

}  // namespace jax_flash
