// Backward kernel for dQ of wide heads, for Ampere and later: ampere/backward_query.cuh with K and V in slices
// (ampere/slices.cuh). Each CTA keeps one tile of Q and dO, and loops over tiles of K and V:
//   S = Q K_j^T;   P = exp(S - L);   dP = dO V_j^T;   dS = P (dP - D);   dQ += dS K_j
// The warps exchange dS through shared memory. ampere/backward_prepare.cuh has computed L and D.
#pragma once

#include "ampere/wide_kv_loop.cuh"
#include "ampere/wide_scores.cuh"

namespace jax_flash::ampere::backward_query {

constexpr int kPartSlice = kSlice / kColumnWarps;  // columns of a slice of dQ for each warp

struct Shared {
  SlicedTile<kRows, kQKDim> q;
  SlicedTile<kRows, kVDim> d_o;
  SharedTile<kRows, kKeys> ds;
  SharedTile<kKeys, kSlice> slices[kStages];  // of K and V
};

struct BackwardQuery {
  const Params& p;
  const QTile& tile;
  Shared& shared;
  const int part_column = threadIdx.x / 32 % kColumnWarps * kPartSlice;

  Accumulator<kWarpRows, kPartSlice> dQ[kQKSlices];

  __device__ __forceinline__ BackwardQuery(const Params& p, const QTile& tile, Shared& shared)
      : p(p), tile(tile), shared(shared) {
#pragma unroll
    for (int n = 0; n < kQKSlices; ++n) Clear(dQ[n]);
  }

  // Processes one kv tile. Numbers are lines of Algorithm 4.
  template <typename Slices>
  __device__ __forceinline__ void Step(Slices& slices, int column) {
    WideScores<kWarps, kRows, kKeys> scores(p, tile.batch, tile.head, tile.row, column);
#pragma unroll 1
    for (int n = 0; n < kQKSlices; ++n) scores.AddToS(SliceOf(shared.q, n), slices.Next(n));  // 11
    scores.ApplyMasks(!tile.Every(p, column));                                                // 12
    scores.ToP([](int, int, const float (&)[4]) {});                                          // 13, 14
#pragma unroll 1
    for (int n = 0; n < kVSlices; ++n) scores.AddToDP(SliceOf(shared.d_o, n), slices.Next(kQKSlices + n));  // 17
    scores.template ToDS<false>(shared.ds);                                                                 // 18, 20
    auto left = LeftOperandOf<kWarpRows / 16, kKeys / kStep>(
        [&](int m, int s) { return shared.ds.RowsAsA(WarpRow() + 16 * m, s); });
#pragma unroll
    for (int n = 0; n < kQKSlices; ++n) {
      const auto& k = slices.Next(kQKSlices + kVSlices + n);  // the first one also waits for dS
      if (n == 0) left.Load();
      AddOperandsTimesRows<kKeys / kStep>(dQ[n], left, k, part_column);  // 21
    }
  }

  __device__ __forceinline__ void Write() {
    const OutputMatrix to = tile.Output(p, p.dq, kQKDim);
    const float scale = ScaleOf(p);
#pragma unroll
    for (int i = 0; i < kQKSlices * kLaneRows * kPartSlice / 8; ++i) {
      const int n = i / (kPartSlice / 8) / kLaneRows, h = i / (kPartSlice / 8) % kLaneRows, c = i % (kPartSlice / 8);
      const int row = tile.LaneRow() + 8 * h, column = n * kSlice + part_column + 8 * c + threadIdx.x % 4 * 2;
      const float* const x = dQ[n][h / 2][c] + h % 2 * 2;
      if (row < p.q_len && column < kQKDim) StorePair<kOutputBytes>(to.At(row, column), x[0] * scale, x[1] * scale);
    }
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_flash_backward_query(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const QTile& tile = TileHere(p);
  BackwardQuery backward(p, tile, shared);
  LoopOverSlices<2 * kQKSlices + kVSlices>(
      p, tile, shared.slices,
      [&] {
        const Matrix Q = tile.Query(p, p.query, kQKDim), dO = tile.Query(p, p.d_o, kVDim);
        const NonEmptyRows wanted(p, tile.batch, tile.head);
        shared.q.template LoadColumns<kThreads>([&](int i) { return Q.At(i, 0); }, tile.row, p.q_len, kQKDim, wanted);
        shared.d_o.template LoadColumns<kThreads>([&](int i) { return dO.At(i, 0); }, tile.row, p.q_len, kVDim, wanted);
      },
      [&] { shared.q.template Landed<kThreads>(), shared.d_o.template Landed<kThreads>(); }, backward);
  backward.Write();
}

}  // namespace jax_flash::ampere::backward_query
