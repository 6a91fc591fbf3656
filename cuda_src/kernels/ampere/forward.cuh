// The forward for every GPU since Ampere: Algorithm 2 of the paper with its loops exchanged. A CTA keeps a tile of Q
// and walks K and V; each warp owns 16 or 32 rows of Q and O:
//   S = Q K_j^T;   m, l, P = online softmax of S;   O = diag(alpha) O + P V_j
#pragma once

#include "ampere/walk.cuh"

namespace jax_flash {

// So many steps of k of Q stay in registers as there is room for beside O and S, which is less with 32 rows to a warp
// or f32, and less with features. Operands of two parts leave none.
constexpr int kRegisters = kScores || kMask || kBlockMask || kSegments || kWindow || kDropout ? 128
                           : kWarpRows == 32 || kDType == DType::kF32                         ? 160
                                                                                              : 192;
constexpr int kHeldSteps = kSplit ? 0 : (kRegisters - kWarpRows * (RoundUp(kVDim, 16) + kCols) / 32) / (kWarpRows / 4);

// No registers are left to work ahead beside what these masks keep in some.
constexpr bool kPositions = kWindow || kSegments || kQLengths || kKVLengths;
constexpr bool kCrowded =
    kWarpRows == 32 && ((kDType == DType::kF32 && kPositions) || (kBlockMask && (kPositions || kDropout)));

// The loads of the next tiles are begun between the steps of S = Q K^T. But first of all where memory bounds the speed;
// and after S, while another block multiplies, where a multiprocessor has two (an H100 or H200, with few warps and 16
// bits) and what else is kept leaves the registers for it.
constexpr bool kLoadsFirst = kParts;
constexpr bool kLoadsAfter = !kParts && kWarps <= 4 && kQKDim <= 128 && kVDim <= 128 && !kDropout && !kPositions;

struct ForwardShared {
  union {
    SharedTile<kRows, kQKDim> q;
    SharedTile<kRows, kVDim> o;
  };
  KVTiles kv;
};

struct Forward {
  const Params& p;
  const QTile& tile;
  const float unit;

  Accumulator<kWarpRows, RoundUp(kVDim, 16)> O;
  float m[kLaneRows], l[kLaneRows];  // l: of this lane's columns only, until the end
  float reference[kLaneRows];        // what the exponentials are taken against: m, or a little less

  __device__ __forceinline__ Forward(const Params& p, const QTile& tile) : p(p), tile(tile), unit(Unit(p)) {
    Clear(O);
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) m[h] = reference[h] = -Infinity(), l[h] = 0.0f;
  }

  __device__ __forceinline__ void Rescale() {
    float alpha[kLaneRows];
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      alpha[h] = reference[h] == m[h] ? 1.0f : Exp2((reference[h] - m[h]) * unit);
      reference[h] = m[h];
      l[h] *= alpha[h];
    }
    ScaleRows(O, alpha);
  }

  // S becomes P.
  __device__ __forceinline__ void Softmax(Accumulator<kWarpRows, kCols>& S) {
    bool grown = false;
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      float maximum = S[h / 2][0][h % 2 * 2];
#pragma unroll
      for (int c = 0; c < kCols / 8; ++c)
        maximum = fmaxf(maximum, fmaxf(S[h / 2][c][h % 2 * 2], S[h / 2][c][h % 2 * 2 + 1]));
      m[h] = fmaxf(m[h], LaneMax<4>(maximum));
      grown |= (m[h] - reference[h]) * unit > kRescaleAt;
    }
    if (__any_sync(0xFFFFFFFFu, grown)) Rescale();
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      const float shift = reference[h] == -Infinity() ? 0.0f : kMaximumApart ? reference[h] : reference[h] * unit;
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < kCols / 8; ++c) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = S[h / 2][c][h % 2 * 2 + e];
          s = Exp2(kMaximumApart ? (s - shift) * unit : fmaf(s, unit, -shift));
          sum += s;
        }
      }
      l[h] += sum;
    }
  }

  template <typename Rows>
  __device__ __forceinline__ void Step(const Rows& q, const KTile& k, const VTile& v, int column,
                                       const LoadNext& load_next) {
    const Scores scores = tile.WarpScores(p, column);
    Accumulator<kWarpRows, kCols> S;
    Clear(S);
    if (kLoadsFirst) load_next();
    if constexpr (kLoadsFirst || kLoadsAfter) {
      AddRowsTimesRows(S, q, 0, k, 0);
    } else {
      AddRowsTimesRows(S, q, 0, k, 0, load_next);
    }
    if (kLoadsAfter) load_next();
    if (!scores.block.Everything() || !tile.Every(p, column)) scores.Hide(PositionsOf(p, tile.batch), S);
    if (kScores) scores.ToScores(S);
    Softmax(S);
    if (kDropout) scores.Drop(S);
    if (kCrowded && Never()) return;
    AddTimesRows(O, S, v);
  }

  // O = diag(l)^-1 O, l and m.
  __device__ __forceinline__ void Write(SharedTile<kRows, kVDim>& shared) {
    float factor[kLaneRows];
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      l[h] = LaneSum<4>(l[h]);
      factor[h] = l[h] == 0.0f ? 0.0f : KeptScale(p) / l[h];
      if (threadIdx.x % 4 == 0 && tile.LaneRow() + 8 * h < tile.Rows(p)) {
        const float sum = l[h] == 0.0f ? 0.0f : l[h] * Exp2((reference[h] - m[h]) * unit);
        if constexpr (kParts) {
          p.l_parts[tile.Statistic(p, h)] = sum;
          p.m_parts[tile.Statistic(p, h)] = m[h];
        } else {
          p.l[tile.Statistic(p, h)] = sum;
          p.m[tile.Statistic(p, h)] = sum != sum ? sum : kScores ? m[h] : m[h] * ScaleOf(p);
        }
      }
    }
    ScaleRows(O, factor);
    if constexpr (kParts) {
      WritePart();
    } else {
      jax_flash::Write(O, shared, tile.Query(p, p.o, kVDim), tile.row, p.q_len);
    }
  }

 private:
  // O of this part of the keys, in f32.
  __device__ __forceinline__ void WritePart() {
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      if (tile.LaneRow() + 8 * h >= tile.Rows(p)) continue;
      float* const to = p.o_parts + tile.Statistic(p, h) * kVDim + threadIdx.x % 4 * 2;
#pragma unroll
      for (int c = 0; c < kVDim / 8; ++c) {
        const float (&x)[4] = O[h / 2][c];
        *reinterpret_cast<float2*>(to + 8 * c) = make_float2(x[h % 2 * 2], x[h % 2 * 2 + 1]);
      }
    }
  }
};

}  // namespace jax_flash

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(jax_flash::ForwardShared);

extern "C" __global__ void __launch_bounds__(jax_flash::kThreads, 1)
    jax_flash_forward(const __grid_constant__ jax_flash::Params p) {
  using namespace jax_flash;
  extern __shared__ __align__(16) uint8_t memory[];
  ForwardShared& shared = *reinterpret_cast<ForwardShared*>(memory);
  const QTile& tile = TileHere(p);
  WarpRows<decltype(shared.q), kWarpRows / 16, kHeldSteps> q(shared.q, threadIdx.x / 32 * kWarpRows);
  Forward forward(p, tile);
  Walk(
      p, tile, shared.kv, [&] { LoadQ(p, tile, shared.q); }, [&] { shared.q.Landed<kThreads>(); }, [&] { q.Take(); },
      [&](const KTile& k, const VTile& v, int column, const LoadNext& load_next) {
        forward.Step(q, k, v, column, load_next);
      });
  forward.Write(shared.o);
}
