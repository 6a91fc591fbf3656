// How the work on dQ, dK and dV is divided among the threads.
#pragma once

#include "common/problem.h"
#include "cpu_src/block.h"

namespace jax_flash::JAX_FLASH_ISA {

// How much memory the partial sums of dQ may take. (Where one dQ takes more, it may be that of one dQ.)
constexpr int64_t kPartialBytes = int64_t(16) << 20;

// How a dimension is divided: into how many units of work, and how many indices each of them goes through.
struct Split {
  int64_t units, each;

  static Split Of(int64_t count, bool together) { return together ? Split{1, count} : Split{count, 1}; }
};

// Batch entries, heads of K and V, and parts that the tiles of a head's keys are dealt to.
struct Division {
  Split batch, heads;
  int64_t parts;
  bool dbias;  // is it computed on the way? Then each of its entries is summed by one unit, which goes through all its
               // terms

  int64_t units() const { return batch.units * heads.units * parts; }
};

// What one unit goes through.
struct Together {
  bool batch, heads, parts;
};

template <typename A>
int64_t DQBytes(const Problem& p) {
  return p.batch * p.q_heads * p.q_len * RoundUp(p.qk_dim, kLanes<A>) * int64_t(sizeof(A));
}

template <typename A>
Division Divide(const Problem& p, bool dbias, Together together, int64_t threads) {
  Division d = {Split::Of(p.batch, together.batch || (dbias && !p.score.bias.batch)),
                Split::Of(p.kv_heads, together.heads || (dbias && !p.score.bias.heads)), 1, dbias};
  if (together.parts) return d;
  // Keys are not divided into parts where the heads alone divide evenly among the threads, or nearly so.
  const int64_t heads = d.units();
  if (heads % threads && heads < 4 * threads) d.parts = RoundUp(4 * threads, heads) / heads;
  d.parts = Max(1, Min(d.parts, ColumnTiles(p).count()));
  if (p.dq) d.parts = Min(d.parts, Max(2, kPartialBytes / Max(DQBytes<A>(p), 1)));
  return d;
}

// The division with dbias on the way, unless threads would be left without work, or an entry of dbias would belong to
// several units or to none.
template <typename A>
Division Divide(const Problem& p, Together together, int64_t threads) {
  const bool possible = p.dbias && (p.dq || p.dk || p.dv) && p.score.bias.columns && p.batch * p.kv_heads * p.q_len > 0;
  const Division with = Divide<A>(p, possible, together, threads);
  return with.units() >= threads ? with : Divide<A>(p, false, together, threads);
}

}  // namespace jax_flash::JAX_FLASH_ISA
