// dbias kernel for Ampere and later, without atomics. dbias is dS, summed over the dimensions that the bias is
// broadcast over. Each CTA keeps one tile of dbias, and loops in a fixed order over the tiles of S that contribute to
// it. It recomputes S, P, dP and dS, as ampere/backward.cuh does:
//   S = Q_i K_j^T;   P = exp(S - L_i);   dP = dO_i V_j^T;   dbias += P (dP - D_i)
//
// If few tiles have long sums, p.parts CTAs share a tile, and a second kernel adds their parts.
//
// Tiles of S have kRows rows and kKeys columns, both multiples of 16. The host launches
//   jax_flash_backward_prepare       see ampere/backward_prepare.cuh; unless ampere/backward.cuh has run
//   jax_flash_backward_bias          p.parts CTAs of kThreads threads for each tile of dbias
//   jax_flash_backward_bias_finish   if p.parts > 1; see scheduler/bias_sums.cuh
#pragma once

#include "ampere/backward_prepare.cuh"
#include "ampere/parts.cuh"
#include "ampere/scores.cuh"
#include "ptx/warp.cuh"
#include "scheduler/bias_sums.cuh"
#include "scheduler/ranges.cuh"

namespace jax_flash::ampere::dbias {

constexpr int kRows = kTiling.rows;
constexpr int kKeys = kTiling.cols;
constexpr int kWarps = kTiling.groups;
constexpr int kThreads = 32 * kWarps;
using ScorePart = PartOf<kWarps, kRows, kKeys>;

union Shared {
  struct {
    SharedTile<kRows, kQKDim> q;
    SharedTile<kKeys, kQKDim> k;
    SharedTile<kRows, kVDim> d_o;
    SharedTile<kKeys, kVDim> v;
  };
  float sums[kRows][kKeys];
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_flash_backward_bias(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Shape shape(p);
  const ScorePart warp;
  int64_t block = blockIdx.x;
  const int part = PopIndex(&block, p.parts);
  const int own_column = PopIndex(&block, shape.column.Own()), own_row = PopIndex(&block, shape.row.Own());
  const int own_head = PopIndex(&block, shape.head.Own()), own_batch = block;

  Accumulator<ScorePart::kHeight, ScorePart::kWidth> sum;
  Clear(sum);
  const int64_t all = int64_t(shape.batch.Summed()) * shape.head.Summed() * shape.row.Summed() * shape.column.Summed();
  for (int64_t n = all * part / p.parts; n < all * (part + 1) / p.parts; ++n) {
    int64_t item = n;
    const int row = (own_row + PopIndex(&item, shape.row.Summed())) * kRows;
    const int column = (own_column + PopIndex(&item, shape.column.Summed())) * kKeys;
    const int head = own_head + PopIndex(&item, shape.head.Summed()), batch = own_batch + int(item);
    const Positions positions = PositionsOf(p, batch);
    const Visible keys = KeysOf(p, positions, batch, row, row + kRows);
    if (max(keys.any_lo, column) >= min(keys.any_hi, column + kKeys)) continue;
    const int kind = KindOfBlock(p, batch, head, row, column);
    if (Block<false>(p.block_mask, batch, kind).Empty()) continue;

    const int kv_head = head / (p.q_heads / p.kv_heads);
    const Matrix Q(p.query, batch, head, p.q_len, p.q_heads, kQKDim), dO(p.d_o, batch, head, p.q_len, p.q_heads, kVDim);
    const Matrix K(p.key, batch, kv_head, p.kv_len, p.kv_heads, kQKDim);
    const Matrix V(p.value, batch, kv_head, p.kv_len, p.kv_heads, kVDim);
    __syncthreads();  // until all warps are done with the previous tiles
    const NonEmptyRows wanted(p, batch, head);
    shared.q.template Load<kThreads>(Q.data, Q.stride, row, positions.q_length, 0, 1, wanted);
    shared.k.template Load<kThreads>(K.data, K.stride, column, positions.kv_length);
    CpAsyncCommit();
    shared.d_o.template Load<kThreads>(dO.data, dO.stride, row, positions.q_length, 0, 1, wanted);
    shared.v.template Load<kThreads>(V.data, V.stride, column, positions.kv_length);
    CpAsyncCommit();

    const Scores scores(p, batch, head, row + warp.row, column + warp.column, kind);
    float minus_l[ScorePart::kHeight / 16][2], D[ScorePart::kHeight / 16][2];
    Accumulator<ScorePart::kHeight, ScorePart::kWidth> S, dP;
    Scores::SavedScores<ScorePart::kHeight / 16, ScorePart::kWidth / 8> saved;
    CpAsyncWait<1>();
    shared.q.template Landed<kThreads>(), shared.k.template Landed<kThreads>();
    __syncthreads();
    if (warp.active) {
      scores.RowStatistics(p.logsumexp, minus_l);
      scores.RowStatistics(p.d, D);
      Clear(S);
      AddRowsTimesRows(S, shared.q, warp.row, shared.k, warp.column);
      SoftCapTanh(p, S);
      const bool every = keys.every_lo <= column && column + kKeys <= keys.every_hi && row + kRows <= p.q_len;
      if (!every || !scores.block.Full()) scores.ApplyMasks(positions, S);
      scores.ToP<false>(S, minus_l, saved, [](int, int, const float (&)[4]) {});
    }
    CpAsyncWait<0>();
    shared.d_o.template Landed<kThreads>(), shared.v.template Landed<kThreads>();
    __syncthreads();
    if (warp.active) {
      Clear(dP);
      AddRowsTimesRows(dP, shared.d_o, warp.row, shared.v, warp.column);
      scores.ToDS<false, false>(S, D, saved, dP);
#pragma unroll
      for (int i = 0; i < ScorePart::kHeight / 16 * ScorePart::kWidth / 2; ++i) {
        const int m = i / (ScorePart::kWidth / 2), c = i / 4 % (ScorePart::kWidth / 8);
        sum[m][c][i % 4] += dP[m][c][i % 4];
      }
    }
  }

  // Sums over dimensions that are broadcast within the tile: over columns here (into the warp's first column), over
  // rows below.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ScorePart::kHeight / 8 && warp.active; ++i) {
    const int m = i / 2, h = i % 2, lane = threadIdx.x % 32;
    float* to = shared.sums[warp.row + 8 * i + lane / 4] + warp.column;
    float total = 0.0f;
#pragma unroll
    for (int c = 0; c < ScorePart::kWidth / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = sum[m][c][2 * h + e];
        total += x;
        if (shape.column.own) to[8 * c + lane % 4 * 2 + e] = x;
      }
    }
    total = LaneSum<4>(total);
    if (!shape.column.own && lane % 4 == 0) *to = total;
  }
  __syncthreads();
  const Sums sums(p, part);
  const int rows = shape.row.own ? min(kRows, p.q_len - own_row * kRows) : 1;
  const int columns = shape.column.own ? min(kKeys, p.kv_len - own_column * kKeys) : 1;
  for (int x = threadIdx.x; x < rows * columns; x += kThreads) {
    const int i = x / columns, j = x % columns;
    float total = 0.0f;
    for (int r = i; r < (shape.row.own ? i + 1 : kRows); ++r) {
      for (int c = j; c < (shape.column.own ? j + 1 : kKeys); c += ScorePart::kWidth) total += shared.sums[r][c];
    }
    sums.Store(own_batch * p.bias.batch + own_head * p.bias.head + (own_row * kRows + i) * p.bias.row +
                   (own_column * kKeys + j) * p.bias.column,
               total);
  }
}

}  // namespace jax_flash::ampere::dbias
