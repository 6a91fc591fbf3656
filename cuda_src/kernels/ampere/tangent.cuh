// Tangent pass for Ampere and later: the tangents of O and l from Q, K, V, the results of the forward, and the tangents
// of operands. Each CTA keeps one tile of Q and loops over tiles of K and V. Each warp has 16 or 32 rows:
//   S = Q K_j^T;   Ṡ = Q K̇_j^T + Q̇ K_j^T;   E = exp(S - m)
//   A += Z E V̇_j + Z E (Ṡ - r) V_j;   mu += rowsum(E (Ṡ - r))
// semantics/tangent.cuh gets Ȯ and the tangent of l from A and mu. hopper/tangent.cuh explains the reference r. Scale,
// soft cap, bias and score_mod turn Q K^T into the score, and their derivative turns the sum of products into Ṡ.
#pragma once

#include "ampere/kv_loop.cuh"

namespace jax_flash::ampere::tangent {

struct Shared {
  union {
    SharedTile<kRows, kQKDim> q;
    SharedTile<kRows, kVDim> o_tangent;
  };
  SharedTile<kQueryMoves ? kRows : 16, kQKDim> q_tangent;
  KVTiles kv;
};

struct Tangent {
  using S = Accumulator<kWarpRows, kKeys>;

  const TangentParams& p;
  const QTile& tile;

  Accumulator<kWarpRows, RoundUp(kVDim, 16)> A;
  float minus_m[kLaneRows], m[kLaneRows], mu[kLaneRows], reference[kLaneRows];
  float rounded_mu[kWarpRows / 16][4] = {};  // the same sums as mu, of rounded terms
  bool lacks_reference[kLaneRows];

  __device__ __forceinline__ Tangent(const TangentParams& p, const QTile& tile) : p(p), tile(tile) {
    Clear(A);
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      const int64_t at = tile.Statistic(p, h);
      const bool inside = tile.LaneRow() + 8 * h < p.q_len;
      minus_m[h] = inside ? MinusMOfRow(p, at) : -Infinity();
      m[h] = kSeparateMaximum && inside && p.m[at] != -Infinity() ? p.m[at] : 0.0f;
      mu[h] = reference[h] = 0.0f;
      lacks_reference[h] = minus_m[h] != -Infinity();
    }
  }

  // Turns q_i k_j, or what Cap has made of it, into E, and its tangent into that of the score.
  __device__ __forceinline__ void ToE(const Scores& scores, S& E, S& S_dot) const {
    const float to_log2 = ToLog2(p), scale = ScaleOf(p);
#pragma unroll
    for (int n = 0; n < kWarpRows / 16 * kKeys / 8 * 4; ++n) {
      const int t = n / 4 / (kKeys / 8), c = n / 4 % (kKeys / 8), r = n % 4, h = 2 * t + r / 2;
      const int i = scores.Row(t, r / 2), j = scores.Column(c, r % 2);
      float& x = E[t][c][r];
      float s = x;
      float& s_dot = S_dot[t][c][r];
      if (kScoresMove) s_dot *= scale * SlopeOf(x);
      if (kWholeScores && x != -Infinity()) {
        s = scores.score.BeforeMod(x, i, j);
        if (kBiasMoves) s_dot += scores.score.BiasTangent(p, i, j);
        if (kScoresMove) s_dot = scores.score.TangentOfMod(s, s_dot, i, j);
        s = scores.score.Mod(s, i, j);
      }
      x = Exp2(fmaf(kSeparateMaximum ? s - m[h] : s, to_log2, minus_m[h]));
      if (kScoresMove && x == 0.0f) s_dot = 0.0f;  // of a masked entry it may be NaN
    }
  }

  // The reference of a row: the mean of Ṡ over the first tile in which E is not 0, weighted by E.
  __device__ __forceinline__ void SetReferences(S& E, S& S_dot) {
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      if (!__any_sync(0xFFFFFFFFu, lacks_reference[h])) continue;
      float weight = 0.0f, sum = 0.0f;
#pragma unroll
      for (int x = 0; x < kKeys / 4; ++x) weight += At(E, h, x), sum = fmaf(At(E, h, x), At(S_dot, h, x), sum);
      weight = LaneSum<4>(weight), sum = LaneSum<4>(sum);
      if (lacks_reference[h] && weight > 0.0f) reference[h] = sum / weight, lacks_reference[h] = false;
    }
  }

  __device__ __forceinline__ void Step(const Shared& shared, const KTile& k, const VTile& v, int column,
                                       const LoadNext& load_next) {
    const int row = threadIdx.x / 32 * kWarpRows, stage = int(&k - shared.kv.k);
    const Scores scores = tile.WarpScores(p, column);
    S E, S_dot;
    Clear(E);
    AddRowsTimesRows(E, shared.q, row, k, 0, load_next);
    if (kScoresMove) Clear(S_dot);
    if constexpr (kKeyMoves) AddRowsTimesRows(S_dot, shared.q, row, shared.kv.k_tangent[stage], 0);
    if constexpr (kQueryMoves) AddRowsTimesRows(S_dot, shared.q_tangent, row, k, 0);
    SoftCapTanh(p, E);
    if (!scores.block.Full() || !tile.Every(p, column)) scores.ApplyMasks(PositionsOf(p, tile.batch), E);
    ToE(scores, E, S_dot);
    if constexpr (kScoresMove) {
      SetReferences(E, S_dot);
#pragma unroll
      for (int h = 0; h < kLaneRows; ++h) {
#pragma unroll
        for (int x = 0; x < kKeys / 4; ++x) {
          float& e_dot = At(S_dot, h, x);
          e_dot = At(E, h, x) * (e_dot - reference[h]);
          if (kLTangent) mu[h] += e_dot;
        }
      }
      AddRowSums(rounded_mu, S_dot);
      scores.ApplyZ(E, S_dot);
      AddTimesRows(A, S_dot, v);
    } else {
      scores.ApplyZ(E);
    }
    if constexpr (kValueMoves) AddTimesRows(A, E, shared.kv.v_tangent[stage]);
  }

  __device__ __forceinline__ void Write(SharedTile<kRows, kVDim>& shared) {
    const MatrixOf<4> o(p.o, tile.batch, tile.head, p.q_len, p.q_heads, kVDim);
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      if (kLTangent) mu[h] = LaneSum<4>(mu[h]);
      const int row = tile.LaneRow() + 8 * h;
      if (row >= p.q_len) continue;
      const int64_t at = tile.Statistic(p, h);
      const float rounded = rounded_mu[h / 2][h % 2 * 2];
      const TangentOfRow results(p, tile.batch, tile.head, at, mu[h], rounded, reference[h]);
      if (kLTangent && threadIdx.x % 4 == 0) p.l_tangent[at] = results.l;
#pragma unroll
      for (int c = 0; c < kVDim / 8; ++c) {
        const float2 x = LoadPair<4>(o.At(row, 8 * c + threadIdx.x % 4 * 2));
        float* const a = A[h / 2][c] + h % 2 * 2;
        a[0] = results.Of(a[0], x.x), a[1] = results.Of(a[1], x.y);
      }
    }
    WriteOutput(A, shared, tile.Output(p, p.o_tangent, kVDim), tile.row, p.q_len);
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(kThreads, 1) jax_flash_tangent(const __grid_constant__ TangentParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const QTile& tile = TileHere(p);
  Tangent tangent(p, tile);
  LoopOverKV(
      p, tile, shared.kv,
      [&] {
        LoadQ(p, tile, shared.q);
        if constexpr (kQueryMoves) {
          const Matrix moved = tile.Query(p, p.query_tangent, kQKDim);
          shared.q_tangent.template Load<kThreads>(moved.data, moved.stride, tile.row, p.q_len);
        }
      },
      [&] {
        shared.q.Landed<kThreads>();
        if constexpr (kQueryMoves) shared.q_tangent.template Landed<kThreads>();
      },
      [] {},
      [&](const KTile& k, const VTile& v, int column, const LoadNext& load_next) {
        tangent.Step(shared, k, v, column, load_next);
      });
  tangent.Write(shared.o_tangent);
}

}  // namespace jax_flash::ampere::tangent
