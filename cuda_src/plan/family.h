// A family of kernels: which problems it does, with which tiles, by which launches, and what keeps it from others. Each
// is a file: hopper.cc, ampere.cc. Hopper's own kernels come first where they fit, those of Ampere do for all.
#pragma once

#include <string>
#include <vector>

#include "cuda_src/contract.h"
#include "cuda_src/plan/plan.h"

namespace jax_flash {

inline int64_t DivideUp(int64_t x, int64_t y) { return (x + y - 1) / y; }
inline int64_t RoundUp(int64_t x, int64_t y) { return DivideUp(x, y) * y; }

inline int64_t RowTiles(const Problem& p, int rows) { return DivideUp(p.q_len_in_blocks(), rows); }
inline int64_t ColumnTiles(const Problem& p, int cols) { return DivideUp(p.kv_len_in_blocks(), cols); }

// dQ grows in memory, in no fixed order. Otherwise a kernel of its own computes it.
inline bool SumsDQ(const Problem& p) { return p.dq && !p.deterministic; }
// Is there work for the kernel that computes dK and dV, and dQ if it grows?
inline bool HasMain(const Problem& p) { return p.dk || p.dv || SumsDQ(p) || p.captured_gradients(); }

// How much of a problem the kernels of a file depend on: on what both passes ask of it; besides on what only the
// backward asks; or also on which gradients the backward's main kernel computes.
enum class Asks { kOfBoth, kOfBackward, kOfMain };

// Adds a unit to the plan: `file`, in cuda_src/kernels, compiled for this. Returns its number.
int AddUnit(const std::string& file, Asks asks, const Problem& p, const KernelTiling& tiling, Plan* plan);

// The work on dbias. A block has one tile of dbias at a time, and adds up all tiles of S that the bias is broadcast
// over. Where few tiles have much to add up, each is divided into parts.
struct BiasWork {
  int64_t tiles, summed;  // tiles of dbias; tiles of S that are added up in each of them
  int64_t elements, parts = 1;
};
// The work in tiles of this size, undivided.
BiasWork BiasWorkIn(const Problem& p, const KernelTiling& tiling);
// Reserves scratch memory for the parts, if there are several, and adds the launch that adds them up.
void AddBiasFinish(const BiasWork& work, int unit, Plan* plan);

// Reserves L and D of each row of Q. Returns the number of rows in scratch memory.
int64_t ReserveRows(const Problem& p, Plan* plan);

// The candidates for the tiles of a kernel, in the order in which they are tried.
using Tilings = std::vector<KernelTiling>;

namespace hopper {

// The candidates for the tiles of the forward, or of the backward's main kernel; none where Hopper's kernels do not
// fit.
Tilings Candidates(const Target& target, const Problem& p, Pass pass);
// The candidates for a deterministic backward whose main kernel adds to dQ in a fixed order; none if another kernel has
// to compute dQ.
Tilings OrderedCandidates(const Target& target, const Problem& p);
// Why they do not fit, on a GPU that they are for.
std::string WhyNot(const Target& target, const Problem& p, Pass pass);

// The same of the pass for dbias.
Tilings BiasCandidates(const Target& target, const Problem& p);
std::string WhyNotBias(const Target& target, const Problem& p);

void AddForward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan);
// dbias. `prepared`: has Hopper's backward been before?
void AddBias(const Target& target, const Problem& p, const KernelTiling& tiling, bool prepared, Plan* plan);
// Adds all launches of the backward but those that are added by ampere::, below.
void AddBackward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan);

}  // namespace hopper

namespace ampere {

// Whether few queries see many keys. Such a forward is Ampere's by choice, and not because no tiles of Hopper's fit.
bool FewQueries(const Target& target, const Problem& p);

// Whether such a forward divides the keys into parts, which are merged. It has no candidates for its tiles.
bool SplitsKeys(const Target& target, const Problem& p);
void AddSplitForward(const Target& target, const Problem& p, Plan* plan);

// The candidates for the tiles of each kernel. Throw std::invalid_argument if there are none.
Tilings Candidates(const Target& target, const Problem& p, Pass pass);
Tilings QueryCandidates(const Target& target, const Problem& p);
Tilings BiasCandidates(const Target& target, const Problem& p);

void AddForward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan);
void AddBackward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan);
// L and D of each row, and what rows add to other gradients, where no other kernels of a backward need them.
void AddRows(const Problem& p, Plan* plan);
// dQ alone, and dbias, whose kernels are for every GPU. `prepared`: has Ampere's backward been before?
void AddQuery(const Problem& p, const KernelTiling& tiling, Plan* plan);
void AddBias(const Target& target, const Problem& p, const KernelTiling& tiling, bool prepared, Plan* plan);

}  // namespace ampere
}  // namespace jax_flash
