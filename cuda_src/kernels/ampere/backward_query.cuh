// Backward kernel for dQ only, without atomics, for Ampere and later: Algorithm 4 of the paper with its loops
// exchanged. Each CTA keeps one tile of Q and dO, and loops over tiles of K and V. Each warp owns 16 or 32 rows of Q,
// dO and dQ:
//   S = Q K_j^T;   P = exp(S - L);   dP = dO V_j^T;   dS = P (dP - D);   dQ += dS K_j
// It computes L = m + log l and D of its rows from m, l and O, without a separate kernel before.
#pragma once

#include "ampere/kv_loop.cuh"

namespace jax_flash::ampere::backward_query {

struct Shared {
  SharedTile<kRows, kQKDim> q;  // reused for dQ at the end
  SharedTile<kRows, kVDim> d_o;
  KVTiles kv;
};

struct BackwardQuery {
  const Params& p;
  const QTile& tile;

  Accumulator<kWarpRows, RoundUp(kQKDim, 16)> dQ;
  float minus_l[kLaneRows / 2][2], D[kLaneRows / 2][2];

  __device__ __forceinline__ BackwardQuery(const Params& p, const QTile& tile) : p(p), tile(tile) {
    Clear(dQ);
    const OutputMatrix o = tile.Output(p, p.o, kVDim);
    const Matrix d_o = tile.Query(p, p.d_o, kVDim);
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      const int row = tile.LaneRow() + 8 * h;
      const bool inside = row < p.q_len;
      const int64_t at = tile.Statistic(p, h);
      minus_l[h / 2][h % 2] = inside ? MinusLOfRow(p, tile.batch, tile.head, at) : -Infinity();
      float sum = 0.0f;
      for (int e = threadIdx.x % 4 * 8; inside && e < kVDim; e += 32) {
        float x[8], y[8];
        LoadEight<kOutputBytes>(o.At(row, e), x);
        LoadEight<kElementBytes>(d_o.At(row, e), y);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(x[i], y[i], sum);
      }
      sum = LaneSum<4>(sum);
      D[h / 2][h % 2] = inside ? RowGradients(p, tile.batch, tile.head, at, sum).d : sum;
    }
  }

  __device__ __forceinline__ void Step(const Shared& shared, const KTile& k, const VTile& v, int column,
                                       const LoadNext& load_next) {
    const int row = threadIdx.x / 32 * kWarpRows;
    const Scores scores = tile.WarpScores(p, column);
    Accumulator<kWarpRows, kKeys> S, dP;
    Clear(S);
    AddRowsTimesRows(S, shared.q, row, k, 0, load_next);  // line 11 of Algorithm 4
    SoftCapTanh(p, S);
    if (!scores.block.Full() || !tile.Every(p, column)) scores.ApplyMasks(PositionsOf(p, tile.batch), S);  // 12
    Scores::SavedScores<kWarpRows / 16, kKeys / 8> saved;
    scores.ToP<true>(S, minus_l, saved, [](int, int, const float (&)[4]) {});  // 13, 14
    Clear(dP);
    AddRowsTimesRows(dP, shared.d_o, row, v, 0);  // 17
    scores.ToDS<true, false>(S, D, saved, dP);    // 18, 20
    AddTimesRows(dQ, dP, k);                      // 21
  }

  __device__ __forceinline__ void Write(SharedTile<kRows, kQKDim>& shared) {
    float scale[kLaneRows];
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) scale[h] = ScaleOf(p);
    ScaleRows(dQ, scale);
    WriteOutput(dQ, shared, tile.Output(p, p.dq, kQKDim), tile.row, p.q_len);
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_flash_backward_query(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const QTile& tile = TileHere(p);
  const Matrix Q = tile.Query(p, p.query, kQKDim), dO = tile.Query(p, p.d_o, kVDim);
  BackwardQuery backward(p, tile);
  LoopOverKV(
      p, tile, shared.kv,
      [&] {
        const NonEmptyRows wanted(p, tile.batch, tile.head);
        shared.q.Load<kThreads>(Q.data, Q.stride, tile.row, p.q_len, 0, 1, wanted);
        shared.d_o.Load<kThreads>(dO.data, dO.stride, tile.row, p.q_len, 0, 1, wanted);
      },
      [&] { shared.q.Landed<kThreads>(), shared.d_o.Landed<kThreads>(); }, [] {},
      [&](const KTile& k, const VTile& v, int column, const LoadNext& load_next) {
        backward.Step(shared, k, v, column, load_next);
      });
  backward.Write(shared.q);
}

}  // namespace jax_flash::ampere::backward_query
