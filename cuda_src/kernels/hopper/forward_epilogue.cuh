// The epilogue of the Hopper forward. A consumer warpgroup writes O, l and m (lines 15 and 16 of Algorithm 2), once for
// each q tile.
#pragma once

#include "hopper/forward_softmax.cuh"
#include "ptx/tma.cuh"

namespace jax_flash::hopper::forward {

struct Epilogue : Probabilities {
  using Probabilities::Probabilities;

  // If two warpgroups share 64 rows, the first half of the keys finishes first. Its warpgroup sends its partial O, m
  // and l to the other warpgroup, and continues with the next tile.
  __device__ __forceinline__ void Finish(const QTile& tile, const TensorMap* o_map) {
    if (kKeyGroups == 1) {
      Write(tile, o_map);
    } else if (key_group == 0) {
      SendPartial();
    } else {
      MergePartial();
      Write(tile, o_map);
    }
  }

  __device__ __forceinline__ void SendPartial() {
    auto* const to = shared.partial[row_group];
    const int thread = threadIdx.x % kWarpgroup;
    BarrierSync(kPartialEmpty + row_group, 2 * kWarpgroup);
#pragma unroll
    for (int i = 0; i < kVDim / 2; ++i) to[i][thread] = O[i];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto* const row = to + kVDim / 2 + 3 * h;
      row[0][thread] = softmax.m[h], row[1][thread] = softmax.l[h], row[2][thread] = softmax.reference[h];
    }
    BarrierArrive(kPartialFull + row_group, 2 * kWarpgroup);
  }

  // Merges the partial O, m and l of the first half of the keys into those of the second half.
  __device__ __forceinline__ void MergePartial() {
    const auto* const from = shared.partial[row_group];
    const int thread = threadIdx.x % kWarpgroup;
    float alpha[2], beta[2];
    BarrierSync(kPartialFull + row_group, 2 * kWarpgroup);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto* const row = from + kVDim / 2 + 3 * h;
      softmax.Merge(h, row[0][thread], row[1][thread], row[2][thread], alpha + h, beta + h);
    }
#pragma unroll
    for (int i = 0; i < kVDim / 2; ++i) O[i] = O[i] * alpha[i / 2 % 2] + from[i][thread] * beta[i / 2 % 2];
    BarrierArrive(kPartialEmpty + row_group, 2 * kWarpgroup);
  }

  // Writes O, l and m of a tile in which all rows are fully masked.
  __device__ __forceinline__ void WriteEmpty(const QTile& tile) {
    constexpr int kChunks = kVDim * kOutputBytes / 16;  // in a row
    const int thread = threadIdx.x % kWarpgroup, row0 = tile.row + 64 * row_group;
    const int rows = key_group == 0 ? min(64, p.q_len - row0) : 0;
    if (thread < rows) {
      const int64_t at = (int64_t(tile.batch) * p.q_heads + tile.head) * p.q_len + row0 + thread;
      p.l[at] = 0.0f, p.m[at] = -Infinity();
    }
    uint4* o = static_cast<uint4*>(p.o) + ((int64_t(tile.batch) * p.q_len + row0) * p.q_heads + tile.head) * kChunks;
#pragma unroll 1
    for (int i = thread; i < rows * kChunks; i += kWarpgroup)
      o[int64_t(i / kChunks) * p.q_heads * kChunks + i % kChunks] = {0, 0, 0, 0};
    SyncWarp();
    Release(&shared.q_empty[q.Index()][row_group]);
  }

  // Writes O = diag(l)^-1 O, l and m.
  __device__ __forceinline__ void Write(const QTile& tile, const TensorMap* o_map) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax.Finish(h);
      const float l = softmax.Denominator(p, tile.batch, tile.head, h);
      factor[h] = softmax.l[h] == 0.0f ? 0.0f : ZScale(p) * Reciprocal(l);
    }
    if constexpr (kUnrounded) {
      WriteUnrounded(tile, factor);
    } else {
      WriteBoxes(tile, o_map, factor);
    }
    if (kOInQ) Release(&shared.q_empty[q.Index()][row_group]);
    WriteStatistics(tile);  // after the fence for the boxes, which would otherwise wait for these stores
  }

  // Writes O by TMA through boxes in shared memory.
  __device__ __forceinline__ void WriteBoxes(const QTile& tile, const TensorMap* o_map, const float (&factor)[2]) {
    using SharedO = SharedTile<kBoxRows, kVBoxes>;  // shared memory may have only two of its boxes
    const SharedO o{kOInQ ? shared.q[q.Index()][row_group] : shared.o[row_group]};
    constexpr int kAtOnce = kOInQ || kOBoxes == kVBoxes ? kVBoxes : 1;  // boxes at a time; if 1, two boxes alternate
    static_assert(kAtOnce == kVBoxes || kOBoxes == 2);
#pragma unroll
    for (int first = 0; first < kVBoxes; first += kAtOnce) {
      const int to = first % 2;  // the first box
      // Waits until the previous store from this box has read it. Before the first box it waits for all stores, so the
      // second box needs no wait.
      if (!kOInQ && first != 1) {
        first == 0 ? TmaWaitRead<0>() : TmaWaitRead<1>();
        SyncWarpgroup();
      }
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) StoreBox(o.Box(to + b) + 16 * warp * kBoxBytes, first + b, factor);
      FenceProxyAsync();
      SyncWarpgroup();
      if (threadIdx.x % kWarpgroup == 0) {
        for (int b = 0; b < kAtOnce; ++b)
          TmaStore(o_map, o.Box(to + b), (first + b) * kBoxColumns, tile.row + 64 * row_group, tile.head, tile.batch);
        TmaCommit();
        if (kOInQ) TmaWaitRead<0>();
      }
    }
  }

  // Writes O in f32 from registers, since the boxes have 16-bit elements.
  __device__ __forceinline__ void WriteUnrounded(const QTile& tile, const float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = Row(tile) + 8 * h;
      if (row >= p.q_len) continue;
      const int64_t at = (int64_t(tile.batch) * p.q_len + row) * p.q_heads + tile.head;
      float2* const to = static_cast<float2*>(p.o) + at * (kVDim / 2) + lane % 4;
#pragma unroll
      for (int c = 0; c < kVDim / 8; ++c)
        to[4 * c] = make_float2(O[4 * c + 2 * h] * factor[h], O[4 * c + 2 * h + 1] * factor[h]);
    }
  }

  __device__ __forceinline__ void WriteStatistics(const QTile& tile) {
    const int row = Row(tile);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane % 4 == 0 && row + 8 * h < p.q_len) {
        const int64_t at = (int64_t(tile.batch) * p.q_heads + tile.head) * p.q_len + row + 8 * h;
        p.m[at] = softmax.RowMaximum(p, h), p.l[at] = softmax.RowSum(h);
      }
    }
  }

  // Writes O / l to this warp's rows of a box in shared memory.
  __device__ __forceinline__ void StoreBox(uint8_t* rows, int box, const float (&factor)[2]) {
#pragma unroll
    for (int c = 0; c < 4 && (4 * box + c) * kStep < kVDim; ++c) {
      const uint32_t to = MatricesOf(rows, lane, c);
      const float* x = O + (4 * box + c) * kStep / 2;
      if constexpr (kTF32) {
        Stmatrix(to, __float_as_uint(x[0] * factor[0]), __float_as_uint(x[2] * factor[1]),
                 __float_as_uint(x[1] * factor[0]), __float_as_uint(x[3] * factor[1]));
      } else {
        // The last 8 columns of 16 may be beyond the head dim.
        const float* y = (4 * box + c) * kStep + 8 < kVDim ? x + 4 : x;
        Stmatrix(to, Pack(x[0] * factor[0], x[1] * factor[0]), Pack(x[2] * factor[1], x[3] * factor[1]),
                 Pack(y[0] * factor[0], y[1] * factor[0]), Pack(y[2] * factor[1], y[3] * factor[1]));
      }
    }
  }
};

}  // namespace jax_flash::hopper::forward
