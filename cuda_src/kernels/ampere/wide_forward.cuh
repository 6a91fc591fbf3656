// Forward kernel for wide heads, for Ampere and later: ampere/forward.cuh with K and V in slices (ampere/slices.cuh).
// The warps of a row divide the keys of a tile of S. They exchange the maxima of their rows, and P, through shared
// memory:
//   S = Q K_j^T, slice by slice;   m, l, P = online softmax of S;   O = diag(alpha) O + P V_j, slice by slice
#pragma once

#include "ampere/balanced_split.cuh"
#include "ampere/wide_kv_loop.cuh"

namespace jax_flash::ampere::forward {

// Columns of S and of a slice of O for each warp. With few keys, several warps compute the same part of S.
constexpr int kScoreParts = kColumnWarps * 16 <= kKeys ? kColumnWarps : kKeys / 16;
constexpr int kPartKeys = kKeys / kScoreParts, kPartSlice = kSlice / kColumnWarps;
static_assert(kPartKeys % 16 == 0 && kPartSlice % 16 == 0);

struct Shared {
  SlicedTile<kRows, kQKDim> q;
  SharedTile<kRows, kKeys> p;
  SharedTile<kKeys, kSlice> slices[kStages];  // of K and V
  float rows[kScoreParts][kRows];             // maxima or sums of the parts of S
};

struct Forward {
  const Params& p;
  const QTile& tile;
  Shared& shared;
  const int column_warp = threadIdx.x / 32 % kColumnWarps;

  Accumulator<kWarpRows, kPartSlice> O[kVSlices];
  OnlineSoftmax<kLaneRows> softmax;

  __device__ __forceinline__ Forward(const Params& p, const QTile& tile, Shared& shared)
      : p(p), tile(tile), shared(shared) {
#pragma unroll
    for (int n = 0; n < kVSlices; ++n) Clear(O[n]);
    softmax.Start();
    softmax.to_log2 = ToLog2(p);
  }

  // Combines a number of each row over the parts of S.
  template <typename Combine>
  __device__ __forceinline__ void OverParts(float (&x)[kLaneRows], Combine combine) {
    const int row = WarpRow() + threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      if (threadIdx.x % 4 == 0 && column_warp < kScoreParts) shared.rows[column_warp][row + 8 * h] = x[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      x[h] = shared.rows[0][row + 8 * h];
#pragma unroll
      for (int part = 1; part < kScoreParts; ++part) x[h] = combine(x[h], shared.rows[part][row + 8 * h]);
    }
  }

  // Replaces S by P. O is rescaled if one row of the warp needs it.
  __device__ __forceinline__ void ToP(Accumulator<kWarpRows, kPartKeys>& S) {
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) softmax.Maximum(S, h);
    OverParts(softmax.m, [](float a, float b) { return fmaxf(a, b); });
    bool grown = false;
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) grown |= softmax.Grown(h);
    if (__any_sync(0xFFFFFFFFu, grown)) {
      float alpha[kLaneRows];
#pragma unroll
      for (int h = 0; h < kLaneRows; ++h) alpha[h] = softmax.reference[h] == softmax.m[h] ? 1.0f : softmax.Rescale(h);
#pragma unroll
      for (int n = 0; n < kVSlices; ++n) ScaleRows(O[n], alpha);
    }
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) softmax.Exponentials(S, h, softmax.Shift(h));
  }

  // Processes one kv tile. Numbers are lines of Algorithm 2.
  template <typename Slices>
  __device__ __forceinline__ void Step(Slices& slices, int column) {
    const int part = column_warp % kScoreParts * kPartKeys;
    const Scores scores = tile.WarpScores(p, column, part);
    Accumulator<kWarpRows, kPartKeys> S;
    Clear(S);
#pragma unroll 1
    for (int n = 0; n < kQKSlices; ++n) {
      const auto& k = slices.Next(n);
      AddRowsTimesRows(S, SliceOf(shared.q, n), WarpRow(), k, part);  // 10
    }
    SoftCapTanh(p, S);
    if (!scores.block.Full() || !tile.Every(p, column)) scores.ApplyMasks(PositionsOf(p, tile.batch), S);  // 11
    if (kWholeScores) scores.ToScores(S);
    ToP(S);            // 12, 13
    scores.ApplyZ(S);  // 14
#pragma unroll
    for (int m = 0; m < kWarpRows / 16; ++m) {
#pragma unroll
      for (int c = 0; c < kPartKeys / 8; ++c) shared.p.PutOperand(WarpRow() + 16 * m, part + 8 * c, S[m][c]);
    }
    auto P = LeftOperandOf<kWarpRows / 16, kKeys / kStep>(
        [&](int m, int s) { return shared.p.RowsAsA(WarpRow() + 16 * m, s); });
#pragma unroll
    for (int n = 0; n < kVSlices; ++n) {
      const auto& v = slices.Next(kQKSlices + n);  // the first one also waits for P
      if (n == 0) P.Load();
      AddOperandsTimesRows<kKeys / kStep>(O[n], P, v, column_warp * kPartSlice);  // 15
    }
  }

  // Writes O = diag(l)^-1 O, l and m: the end of line 15, and line 16.
  __device__ __forceinline__ void Write() {
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) softmax.Finish(h);
    OverParts(softmax.l, [](float a, float b) { return a + b; });
    const OutputMatrix to = tile.Output(p, p.o, kVDim);
#pragma unroll
    for (int h = 0; h < kLaneRows; ++h) {
      const float factor = FinishRow(p, tile, softmax, h, threadIdx.x % 4 == 0 && column_warp == 0);
      const int row = tile.LaneRow() + 8 * h;
      if (row >= RowsOfHead(p)) continue;
#pragma unroll
      for (int i = 0; i < kVSlices * kPartSlice / 8; ++i) {
        const int n = i / (kPartSlice / 8), c = i % (kPartSlice / 8);
        const int column = n * kSlice + column_warp * kPartSlice + 8 * c + threadIdx.x % 4 * 2;
        if (column >= kVDim) continue;
        const float* const x = O[n][h / 2][c] + h % 2 * 2;
        if constexpr (kParts) {
          float* const part = p.o_parts + tile.Statistic(p, h) * kVDim + column;
          *reinterpret_cast<float2*>(part) = make_float2(x[0] * factor, x[1] * factor);
        } else {
          StorePair<kOutputBytes>(to.At(row, column), x[0] * factor, x[1] * factor);
        }
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
    Forward forward(p, tile, shared);
    LoopOverSlices<kQKSlices + kVSlices>(
        p, tile, shared.slices,
        [&] {
          const Matrix Q = tile.Query(p, p.query, kQKDim);
          const auto row = [&](int row) { return Q.At(row / kPacked, row % kPacked * kQKDim); };
          shared.q.template LoadColumns<kThreads>(row, tile.row, RowsOfHead(p), kQKDim);
        },
        [&] { shared.q.template Landed<kThreads>(); }, forward);
    forward.Write();
  } while (q_tiles.Next());
}

}  // namespace jax_flash::ampere::forward
