// A family of kernels: which problems it does, with which tiles, by which launches, and what keeps it from others. Each
// is a file: hopper.cc, ampere.cc. Hopper's own kernels come first where they fit, those of Ampere do for all.
#pragma once

#include <optional>
#include <string>

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

// What the kernels of a file ask of a problem: what both passes do, or what the backward does besides, or also which
// gradients its main kernel computes.
enum class Asks { kOfBoth, kOfBackward, kOfMain };

// A unit of `file`, in cuda_src/kernels.
int AddUnit(const std::string& file, Asks asks, const Problem& p, const KernelTiling& tiling, Plan* plan);

// A tile of dbias is one block's at a time, which adds up all tiles of S that the bias is broadcast over; where few
// tiles have much to add up, they are divided into parts.
struct BiasWork {
  int64_t tiles, summed;  // of dbias; of S, in each of them
  int64_t elements, parts = 1;
};
// In tiles of this size, undivided.
BiasWork BiasWorkIn(const Problem& p, const KernelTiling& tiling);
// As it is divided on that GPU.
BiasWork BiasWorkOf(const Target& target, const Problem& p);
// The launch after a pass of a unit over parts, which adds them up.
void AddBiasFinish(const BiasWork& work, int unit, Plan* plan);

namespace hopper {

// Of the forward, or of the backward's main kernel; none where they do not fit.
std::optional<KernelTiling> Tiling(const Target& target, const Problem& p, Pass pass);
// Why there is none on a GPU that they are for.
std::string WhyNot(const Target& target, const Problem& p, Pass pass);

// Of the pass for dbias.
std::optional<KernelTiling> BiasTiling(const Target& target, const Problem& p);
std::string WhyNotBias(const Target& target, const Problem& p);
BiasWork BiasInParts(const Target& target, const Problem& p, const KernelTiling& tiling);

void AddForward(const Problem& p, const KernelTiling& tiling, Plan* plan);
// dbias. `prepared`: has Hopper's backward been before?
void AddBias(const Target& target, const Problem& p, const KernelTiling& tiling, bool prepared, Plan* plan);
// All of the backward but what ampere:: has of it below.
void AddBackward(const Problem& p, const KernelTiling& tiling, Plan* plan);

// Do CTAs take their work from a counter: the lists of a block mask, or in the forward tiles whose work is uneven, if
// there are more than CTAs? (If the backward is alongside it has counters anyway.)
bool Counts(const Target& target, const Problem& p, Pass pass, const KernelTiling& tiling);

// Of how many heads the backward computes tiles of keys at a time; and for how many it uses scratch if it is alongside.
int64_t HeadsAtATime(const Target& target, const Problem& p);
int64_t HeadsInScratch(const Target& target, const Problem& p);

}  // namespace hopper

namespace ampere {

// Whether the forward is one over parts of the keys; how it divides its work.
bool SplitsKeys(const Target& target, const Problem& p);
struct PartWork {
  bool balanced;   // are there stretches of the keys of all batch entries, or parts of each tile of Q's?
  int64_t parts;   // or stretches
  int64_t blocks;  // of the grid
  int64_t tiles;   // of Q, in all batch entries, of a head of the keys
  int64_t rows;    // of O, l and m, of all parts
};
PartWork PartWorkOf(const Target& target, const Problem& p);

// Few queries see many keys: that they are Ampere's is not for Hopper's want of tiles.
bool FewQueries(const Target& target, const Problem& p);

BiasWork BiasInParts(const Target& target, const Problem& p);

void AddForward(const Target& target, const Problem& p, Plan* plan);
void AddBackward(const Target& target, const Problem& p, Plan* plan);
// L and D of each row, and what they are for the sinks, where no other kernels of a backward need them.
void AddRows(const Problem& p, Plan* plan);
// dQ alone, and dbias, whose kernels are for every GPU. `prepared`: has Ampere's backward been before?
void AddQuery(const Target& target, const Problem& p, Plan* plan);
void AddBias(const Target& target, const Problem& p, bool prepared, Plan* plan);

}  // namespace ampere
}  // namespace jax_flash
