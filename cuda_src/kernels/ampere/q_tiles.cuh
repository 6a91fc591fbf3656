// The loop of the backward over q tiles.
#pragma once

#include "scheduler/lists.cuh"

namespace jax_flash::ampere {

// Visits the q tiles that see the kv tile, over all heads of the group.
template <bool kFromList, int kRows>
struct QTiles {
  int head, row;
  const int last_head, first;
  const Visible& rows;

  __device__ __forceinline__ QTiles(const Params& p, int, int kv_head, const BlockList&, const Visible& rows)
      : head(kv_head * (p.q_heads / p.kv_heads)),
        row(rows.any_lo / kRows * kRows),
        last_head(head + p.q_heads / p.kv_heads - 1),
        first(row),
        rows(rows) {}

  __device__ __forceinline__ bool Exists() const { return head <= last_head; }
  __device__ __forceinline__ void Next() {
    const bool end = row + kRows >= rows.any_hi;
    row = end ? first : row + kRows;
    head += end;
  }
};

template <int kRows>
struct QTiles<true, kRows> : ListedQTiles<kRows> {
  using ListedQTiles<kRows>::ListedQTiles;
};

}  // namespace jax_flash::ampere
