// Forward kernel for Ampere and later: Algorithm 2 of the paper with its loops exchanged. Each CTA keeps one tile of Q,
// and loops over tiles of K and V. Each warp owns 16 or 32 rows of Q and O:
//   S = Q K_j^T;   m, l, P = online softmax of S;   O = diag(alpha) O + P V_j
#pragma once

#include "ampere/balanced_split.cuh"
#include "ampere/kv_loop.cuh"
#include "ampere/tuning.cuh"

namespace jax_flash::ampere::forward {

struct Shared {
  union {
    SharedTile<kRows, kQKDim> q;
    SharedTile<kRows, kVDim> o;
  };
  KVTiles kv;
};

struct Forward {
  const Params& p;
  const QTile& tile;

  Accumulator<kWarpRows, RoundUp(kVDim, 16)> O;
  OnlineSoftmax<kLaneRows> softmax;
  const float scale;

  __device__ __forceinline__ Forward(const Params& p, const QTile& tile) : p(p), tile(tile), scale(ScoreScale(p)) {
    Clear(O);
    softmax.Start();
  }

  // Called after Q has arrived and the loads of K and V are in flight. So these loads do not wait for the scale.
  __device__ __forceinline__ void Begin() { softmax.to_log2 = Opaque(scale) * kLog2e; }

  // O = diag(alpha) O. If one row of the warp needs it, all rows are rescaled.
  __device__ __forceinline__ void Rescale() {
    float alpha[kLaneRows];
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) alpha[h] = softmax.reference[h] == softmax.m[h] ? 1.0f : softmax.Rescale(h);
    ScaleRows(O, alpha);
  }

  // Replaces S by P.
  __device__ __forceinline__ void ToP(Accumulator<kWarpRows, kKeys>& S) {
    bool grown = false;
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) grown |= softmax.Maximum(S, h);
    if (__any_sync(0xFFFFFFFFu, grown)) Rescale();
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) softmax.Exponentials(S, h, softmax.Shift(h));
  }

  // Processes one kv tile. Numbers are lines of Algorithm 2.
  template <typename Rows>
  __device__ __forceinline__ void Step(const Rows& q, const KTile& k, const VTile& v, int column,
                                       const LoadNext& load_next) {
    const Scores scores = tile.WarpScores(p, column);
    Accumulator<kWarpRows, kKeys> S;
    Clear(S);
    if (Tuning::kLoadsFirst) load_next();
    if constexpr (Tuning::kLoadsFirst || Tuning::kLoadsAfter) {
      AddRowsTimesRows(S, q, 0, k, 0);  // 10
    } else {
      AddRowsTimesRows(S, q, 0, k, 0, load_next);  // 10
    }
    if (Tuning::kLoadsAfter) load_next();
    SoftCapTanh(p, S);
    if (!scores.block.Full() || !tile.Every(p, column)) scores.ApplyMasks(PositionsOf(p, tile.batch), S);  // 11
    if (kWholeScores) scores.ToScores(S);
    ToP(S);            // 12, 13
    scores.ApplyZ(S);  // 14
    if (Tuning::kStopBeforePV && OpaqueFalse()) return;
    AddTimesRows(O, S, v);  // 15
  }

  // Writes O = diag(l)^-1 O, l and m: the end of line 15, and line 16.
  __device__ __forceinline__ void Write(SharedTile<kRows, kVDim>& shared) {
    float factor[kLaneRows];
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      softmax.Finish(h);
      factor[h] = FinishRow(p, tile, softmax, h, threadIdx.x % 4 == 0);
    }
    ScaleRows(O, factor);
    if constexpr (kParts) {
      WritePart();
    } else {
      WriteOutput(O, shared, tile.Output(p, p.o, kVDim), tile.row, p.q_len);
    }
  }

 private:
  // Writes O of this part of the keys in f32.
  __device__ __forceinline__ void WritePart() {
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      if (tile.LaneRow() + 8 * h >= RowsOfHead(p)) continue;
      float* const to = p.o_parts + tile.Statistic(p, h) * kVDim + threadIdx.x % 4 * 2;
#pragma unroll
      for (int c = 0; c < kVDim / 8; ++c) {
        const float (&x)[4] = O[h / 2][c];
        *reinterpret_cast<float2*>(to + 8 * c) = make_float2(x[h % 2 * 2], x[h % 2 * 2 + 1]);
      }
    }
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(kThreads, 1) jax_flash_forward(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  QTilesOfCTA<kBalanced> q_tiles(p);
  if (!q_tiles.Exists()) return;
  do {
    const QTile& tile = q_tiles.Tile();
    WarpRows<decltype(shared.q), kWarpRows / 16, Tuning::kHeldSteps> q(shared.q, threadIdx.x / 32 * kWarpRows);
    Forward forward(p, tile);
    LoopOverKV(
        p, tile, shared.kv, [&] { LoadQ(p, tile, shared.q); }, [&] { shared.q.Landed<kThreads>(); },
        [&] { q.LoadHeld(), forward.Begin(); },
        [&](const KTile& k, const VTile& v, int column, const LoadNext& load_next) {
          forward.Step(q, k, v, column, load_next);
        });
    forward.Write(shared.o);
  } while (q_tiles.Next());
}

}  // namespace jax_flash::ampere::forward
