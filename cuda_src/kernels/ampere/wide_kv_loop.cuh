// The loop over K and V of the kernels for wide heads that keep a tile of Q: ampere/kv_loop.cuh with slices.
#pragma once

#include "ampere/kv_loop.cuh"
#include "ampere/slices.cuh"

namespace jax_flash::ampere {

// Calls pass.Step(slices, column) for the kv tiles that the q tile sees, from right to left. A step takes kCount
// slices: all of K, all of V, and so on. Before the loop, `load` starts the loads that stay, and `landed` runs after
// the thread's own loads have arrived. The threads have synchronised when it returns.
template <int kCount, typename Load, typename Landed, typename Pass>
__device__ __forceinline__ void LoopOverSlices(const Params& p, const QTile& tile,
                                               SharedTile<kKeys, kSlice> (&buffers)[kStages], Load load, Landed landed,
                                               Pass& pass) {
  KVRange<kListed> range(tile);
  const auto take = [&] {  // the first key of the next tile, or -1
    const int column = range.Exists() ? range.Column() : -1;
    range.Next();
    return column;
  };
  int column = take(), later_column = take();
  const auto load_slice = [&](SharedTile<kKeys, kSlice>& to, int n, bool later) {
    n %= kQKSlices + kVSlices;
    const bool of_key = n < kQKSlices;
    const int first = (of_key ? n : n - kQKSlices) * kSlice, dim = of_key ? kQKDim : kVDim;
    const bool in_key = of_key || kProblem.latent;  // a latent starts with the value
    const Matrix matrix = tile.Key(p, in_key ? p.key : p.value, in_key ? kQKDim : kVDim);
    const auto row = [&](int j) { return matrix.At(kPage > 0 ? PagedKey(p, tile.batch, j) : j, first); };
    const int from = later ? later_column : column;
    to.template LoadColumns<kThreads>(row, max(from, 0), from < 0 ? 0 : tile.keys.any_hi, dim - first);
  };
  load();
  CpAsyncCommit();
  auto slices = SlicesOf<kCount, kThreads>(buffers, load_slice);
  slices.Start();
  landed();
  for (; column >= 0; column = later_column, later_column = take()) pass.Step(slices, column);
  CpAsyncWait<0>();  // a CTA must not exit before its loads complete
  __syncthreads();
}

}  // namespace jax_flash::ampere
