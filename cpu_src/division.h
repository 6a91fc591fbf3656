// Division of the work on dQ, dK and dV among threads.
#pragma once

#include "common/problem.h"
#include "cpu_src/block.h"

namespace jax_flash::JAX_FLASH_ISA {

// The maximum memory for partial sums of dQ, or the size of one dQ if that is larger.
constexpr int64_t kPartialBytes = int64_t(16) << 20;

// The division of a dimension: the number of units of work, and the number of indices in each unit.
struct Split {
  int64_t units, each;

  static Split Of(int64_t count, bool undivided) { return undivided ? Split{1, count} : Split{count, 1}; }

  // The indices of a unit.
  int64_t Begin(int64_t unit) const { return unit * each; }
  int64_t End(int64_t unit) const { return (unit + 1) * each; }
};

// Batch entries, heads of K and V, and parts of a head's kv tiles.
struct WorkSplit {
  Split batch, heads;
  int64_t parts;
  bool dbias;  // do the same units compute dbias? Then one unit sums all terms of an entry of dbias

  int64_t units() const { return batch.units * heads.units * parts; }
};

// The dimensions that one unit loops over.
struct Undivided {
  bool batch, heads, parts;
};

template <typename A>
int64_t DQBytes(const Problem& p) {
  return p.batch * p.q_heads * p.q_len * RoundUp(p.qk_dim, kLanes<A>) * int64_t(sizeof(A));
}

// The division with or without dbias.
template <typename A>
WorkSplit Divide(const Problem& p, bool dbias, Undivided undivided, int64_t threads) {
  WorkSplit d = {Split::Of(p.batch, undivided.batch || (dbias && !p.score.bias.batch)),
                 Split::Of(p.kv_heads, undivided.heads || (dbias && !p.score.bias.heads)), 1, dbias};
  if (undivided.parts) return d;
  // Keys are not divided into parts if the heads divide evenly among the threads, or nearly so.
  const int64_t heads = d.units();
  if (heads % threads && heads < 4 * threads) d.parts = RoundUp(4 * threads, heads) / heads;
  d.parts = Max(1, Min(d.parts, ColumnTiles(p).count()));
  if (p.dq) d.parts = Min(d.parts, Max(2, kPartialBytes / Max(DQBytes<A>(p), 1)));
  return d;
}

// The division with dbias, unless some threads would have no work, or an entry of dbias would have several units or
// none.
template <typename A>
WorkSplit DivideForThreads(const Problem& p, Undivided undivided, int64_t threads) {
  const bool possible = p.dbias && (p.dq || p.dk || p.dv) && p.score.bias.columns && p.batch * p.kv_heads * p.q_len > 0;
  const WorkSplit with = Divide<A>(p, possible, undivided, threads);
  return with.units() >= threads ? with : Divide<A>(p, false, undivided, threads);
}

}  // namespace jax_flash::JAX_FLASH_ISA
