// The interface of a family of kernels: the problems it supports, its tiles and launches, and the reasons why it is not
// used. Each family is a file: hopper.cc, ampere.cc. Hopper's kernels are preferred; Ampere's support every problem.
#pragma once

#include <string>
#include <vector>

#include "cuda_src/contract.h"
#include "cuda_src/plan/plan.h"

namespace jax_flash {

inline int64_t DivideUp(int64_t x, int64_t y) { return (x + y - 1) / y; }
inline int64_t RoundUp(int64_t x, int64_t y) { return DivideUp(x, y) * y; }

inline int64_t RowTiles(const Problem& p, int rows) { return DivideUp(p.padded_q_len(), rows); }
inline int64_t ColumnTiles(const Problem& p, int cols) { return DivideUp(p.padded_kv_len(), cols); }

// Is a head dim above 256, so that tiles go through the kernels in slices (ampere/slices.cuh)?
inline bool HasWideHeads(const Problem& p) { return IsWide(p.qk_dim) || IsWide(p.v_dim); }

// Does the main kernel add dQ in memory? Otherwise a separate kernel computes dQ. If the main kernel can add in a fixed
// order (hopper::OrderedCandidates), the plan of a deterministic backward uses a copy of the problem with
// `deterministic` = false, so this is true.
inline bool SumsDQ(const Problem& p) { return p.dq && !p.deterministic && !HasWideHeads(p); }
// Is there work for the main kernel, which computes dK and dV, and dQ if it adds dQ?
inline bool HasMain(const Problem& p) { return p.dk || p.dv || SumsDQ(p) || p.captured_gradients(); }

// The parts of a problem that the kernels of a file depend on.
enum class DependsOn {
  kEveryPass,  // only properties that every pass depends on
  kBackward,   // also properties of the backward
  kMain,       // also properties of the backward, and which gradients the main kernel computes
  kTangent     // also properties of the tangent
};

// Adds a unit to the plan: `file` of cuda_src/kernels with this configuration. Returns its index.
int AddUnit(const std::string& file, DependsOn depends_on, const Problem& p, const KernelTiling& tiling, Plan* plan);

// The work on dbias. A CTA has one tile of dbias at a time, and sums the tiles of S that share it. If few tiles have
// long sums, each sum is divided into parts.
struct BiasWork {
  int64_t tiles, summed;  // tiles of dbias; tiles of S in each sum
  int64_t elements, parts = 1;
};
// The work with tiles of this size, with one part.
BiasWork BiasWorkIn(const Problem& p, const KernelTiling& tiling);
// If there are several parts, reserves scratch memory for them, and adds the launch that sums them.
void AddBiasFinish(const BiasWork& work, int unit, Plan* plan);

// Reserves L and D of each row of Q. Returns the number of rows in scratch memory.
int64_t ReserveRows(const Problem& p, Plan* plan);

// Candidates for the tiles of a kernel, in the order in which they are tried.
using Tilings = std::vector<KernelTiling>;

namespace hopper {

// Candidates for the tiles of the forward, or of the backward's main kernel. Empty if Hopper's kernels do not support
// the problem.
Tilings Candidates(const Target& target, const Problem& p, Pass pass);
// Candidates for a deterministic backward in which the main kernel adds to dQ in a fixed order. Empty if a separate
// kernel must compute dQ.
Tilings OrderedCandidates(const Target& target, const Problem& p);
// The same for a separate kernel for dQ.
Tilings QueryCandidates(const Target& target, const Problem& p);
// The reason for no candidates, on a GPU of this family.
std::string WhyNot(const Target& target, const Problem& p, Pass pass);

// The same for the dbias kernel.
Tilings BiasCandidates(const Target& target, const Problem& p);
std::string WhyNotBias(const Target& target, const Problem& p);

void AddForward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan);
// Does Hopper's kernel support this split-KV forward? Only for latents (MLA).
bool SplitsKeys(const Target& target, const Problem& p);
void AddSplitForward(const Target& target, const Problem& p, Plan* plan);
void AddTangent(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan);
// Adds dbias. `prepared`: has Hopper's backward run before?
void AddBias(const Target& target, const Problem& p, const KernelTiling& tiling, bool prepared, Plan* plan);
// Adds all launches of the backward except the launches of ampere:: below, and of AddQuery.
void AddBackward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan);
// Adds the kernel for dQ only. Other kernels have computed L and D.
void AddQuery(const Problem& p, const KernelTiling& tiling, Plan* plan);

}  // namespace hopper

namespace ampere {

// Do few queries see many keys? Such a forward uses Ampere's kernels by choice, even if Hopper's support it.
bool FewQueries(const Target& target, const Problem& p);

// Does such a forward use split-KV? Then its tiles have no candidates.
bool SplitsKeys(const Target& target, const Problem& p);
void AddSplitForward(const Target& target, const Problem& p, Plan* plan);
// Adds the kernel that merges the parts of a split-KV forward of another family.
void AddMerge(const Target& target, const Problem& p, int64_t parts, Plan* plan);

// Candidates for the tiles of each kernel. They throw std::invalid_argument if there are none.
Tilings Candidates(const Target& target, const Problem& p, Pass pass);
Tilings QueryCandidates(const Target& target, const Problem& p);
Tilings BiasCandidates(const Target& target, const Problem& p);

void AddForward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan);
void AddTangent(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan);
void AddBackward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan);
// Adds the kernel for L and D of each row, and for the rows' contributions to other gradients, if no other kernel of
// the backward computes them.
void AddRows(const Problem& p, Plan* plan);
// Add the kernels for dQ only, and for dbias, for every GPU. `prepared`: has Ampere's backward run before?
void AddQuery(const Problem& p, const KernelTiling& tiling, Plan* plan);
void AddBias(const Target& target, const Problem& p, const KernelTiling& tiling, bool prepared, Plan* plan);

}  // namespace ampere
}  // namespace jax_flash
