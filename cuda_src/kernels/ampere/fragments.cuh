// Tiles in shared memory and what a warp holds of them, for mma.sync. The same code serves 16-bit elements and f32:
// what differs, the k of an mma and how transposed operands are read, is decided here.
//
//   SharedTile<kRows, kDim>     [kRows][kDim] elements, filled by cp.async; zeros up to whole steps of k
//   Accumulator<kM, kN>         float [kM / 16][kN / 8][4]: element [m][c][2 h + e] of lane l is
//                               row 16 m + l / 4 + 8 h, column 8 c + 2 (l % 4) + e
//   OperandA, OperandB          16 x kStep of A and kStep x 8 of B, as mma.sync takes them, whatever the precision
//   WarpRows<Tile, kCount, kHeld>       a warp's rows of a tile as left operands, of which some stay in registers
//   AddRowsTimesRows(C, a, i, b, j)     C += A B^T: rows of two tiles (Q K^T, dO V^T, ...)
//   AddTimesRows(C, P, b)               C += P B: an accumulator times the rows of a tile (P V, dS K, ...)
//   AddColumnsTimesRows(C, a, i, b)     C += A^T B: the columns of a tile times the rows of one (dK += dS^T Q, ...)
//   AddTileTimesRows(C, a, i, b)        C += A B: rows of a tile that PutOperand has filled times the rows of one
//
// Loads for later can be begun between the steps of a product: it calls between(part, parts) for each part of them. If
// all were begun at once, the operands of the product would have to wait behind them. (With kThreeProducts, where the
// steps are a loop, it is called once, after the loop.)
//
// Rows of tiles start an odd number of 16-byte chunks apart: the 8 rows of a matrix are then in different banks, with
// addresses that are one register and a constant. f32 has no transposing load; there the columns of a tile are read
// element by element, and k is permuted so that this is free of conflicts, and so that an accumulator is an operand as
// it stands: of 8 successive k a lane has 2 (l % 4) + e, where the mma means l % 4 + 4 e. Rows that are multiplied by
// rows keep their order.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"

namespace jax_flash::ampere {

constexpr bool kThreeProducts = kDType == DType::kF32 && kFullPrecision;
constexpr int kUnroll =
    kThreeProducts ? 1 : 64;  // steps of k; with operands in two parts there are no registers for more

__host__ __device__ constexpr int RoundUp(int x, int to) { return (x + to - 1) / to * to; }

template <int kM, int kN>
using Accumulator = float[kM / 16][kN / 8][4];

// f32 is rounded to TF32. The mma alone would cut it off, and errors of one sign add up. Tiles are rounded when they
// have landed, once for all warps that read them, and accumulators when they become operands.
__device__ __forceinline__ float Rounded(float x) { return kTF32 ? __uint_as_float(RoundTF32(__float_as_uint(x))) : x; }

// f32 in full precision: x = big + small, both TF32.
template <int kCount>
struct Operand {
  uint32_t big[kCount], small[kCount];

  __device__ __forceinline__ static Operand Of(const uint32_t (&x)[kCount]) {
    Operand operand;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      operand.big[i] = kThreeProducts ? RoundTF32(x[i]) : x[i];
      if (kThreeProducts) operand.small[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(operand.big[i]));
    }
    return operand;
  }
};
using OperandA = Operand<4>;
using OperandB = Operand<2>;

// c += a b. In full precision these are three products of TF32, which are summed apart from c, since the mma's sums are
// cut off, too.
__device__ __forceinline__ void Mma(float (&c)[4], const OperandA& a, const OperandB& b) {
  if constexpr (kThreeProducts) {
    float sum[4] = {};
    MmaSync(sum, a.small, b.big);
    MmaSync(sum, a.big, b.small);
    MmaSync(sum, a.big, b.big);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += sum[i];
  } else {
    MmaSync(c, a.big, b.big);
  }
}

// An accumulator as an operand: its step `s` of k.
template <int kChunks>
__device__ __forceinline__ OperandA ToOperand(const float (&c)[kChunks][4], int s) {
  if constexpr (kDType == DType::kF32) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __float_as_uint(Rounded(c[s][i % 2 * 2 + i / 2]));
    return OperandA::Of(x);
  } else {
    const uint32_t x[4] = {Pack(c[2 * s][0], c[2 * s][1]), Pack(c[2 * s][2], c[2 * s][3]),
                           Pack(c[2 * s + 1][0], c[2 * s + 1][1]), Pack(c[2 * s + 1][2], c[2 * s + 1][3])};
    return OperandA::Of(x);
  }
}

// Which rows of a matrix a tile wants: all.
struct AllRows {
  __device__ __forceinline__ bool operator()(int) const { return true; }
};

template <int kRows, int kDim>
struct SharedTile {
  static constexpr int kHeight = kRows, kWidth = RoundUp(kDim, 16);
  static constexpr int kChunks = kWidth * kElementBytes / 16;  // of 16 bytes, in a row
  static constexpr int kFilled = kDim * kElementBytes / 16;
  static constexpr int kStride = 16 * (kChunks + 1);  // bytes from row to row
  static constexpr int kSteps = RoundUp(kDim, kStep) / kStep;

  alignas(16) uint8_t bytes[kRows * kStride];

  // Begins to load the rows row0, row0 + 1, ... of a matrix in HBM whose rows are `stride` bytes apart; zeros for
  // rows from `end` on, and for those that are not `wanted`. kThreads threads do it together, or a part of it; the
  // caller commits.
  template <int kThreads, typename Wanted = AllRows>
  __device__ __forceinline__ void Load(const uint8_t* matrix, int64_t stride, int row0, int end, int part = 0,
                                       int parts = 1, Wanted wanted = {}) {
    const Share<kThreads> share;
    const uint32_t to = SharedAddress(bytes) + share.offset;
    const uint8_t* from = matrix + (row0 + share.row) * stride + share.chunk * 16;
    int count = 0;
    share.ForEach([&](int row, int chunk, bool filled) {
      if (count++ % parts != part) return;
      const int r = row0 + share.row + row;
      CpAsync(to + row * kStride + chunk * 16, from + row * stride + chunk * 16, r < end && filled && wanted(r));
    });
  }

  // The same for rows that lie anywhere: row_at(row) is the address of one.
  template <int kThreads, typename RowAt>
  __device__ __forceinline__ void LoadRows(RowAt row_at, int row0, int end, int part = 0, int parts = 1) {
    const Share<kThreads> share;
    const uint32_t to = SharedAddress(bytes) + share.offset;
    int count = 0;
    share.ForEach([&](int row, int chunk, bool filled) {
      if (count++ % parts != part) return;
      const int r = row0 + share.row + row;
      CpAsync(to + row * kStride + chunk * 16, row_at(r) + (share.chunk + chunk) * 16, r < end && filled);
    });
  }

  // Called when what this thread has loaded is there; after it the threads still have to synchronise.
  template <int kThreads>
  __device__ __forceinline__ void Landed() {
    if constexpr (kTF32) {
      const Share<kThreads> share;
      uint8_t* at = bytes + share.offset;
      share.template ForEach<4>([&](int row, int chunk, bool) {
        float4& x = *reinterpret_cast<float4*>(at + row * kStride + chunk * 16);
        x = make_float4(Rounded(x.x), Rounded(x.y), Rounded(x.z), Rounded(x.w));
      });
    }
  }

  // Stores the rows below `end`, after the threads have synchronised.
  template <int kThreads>
  __device__ __forceinline__ void Store(uint8_t* matrix, int64_t stride, int row0, int end) const {
    const Share<kThreads> share;
    const uint8_t* from = bytes + share.offset;
    uint8_t* to = matrix + (row0 + share.row) * stride + share.chunk * 16;
    share.ForEach([&](int row, int chunk, bool filled) {
      if (row0 + share.row + row < end && filled) {
        *reinterpret_cast<uint4*>(to + row * stride + chunk * 16) =
            *reinterpret_cast<const uint4*>(from + row * kStride + chunk * 16);
      }
    });
  }

  // Converts the 16 x 8 elements of an accumulator, and puts them at (row, column).
  __device__ __forceinline__ void Put(int row, int column, const float (&c)[4]) {
    const int lane = threadIdx.x % 32;
    uint8_t* to = bytes + (row + lane / 4) * kStride + (column + lane % 4 * 2) * kElementBytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kDType == DType::kF32) {
        *reinterpret_cast<float2*>(to + 8 * h * kStride) = make_float2(c[2 * h], c[2 * h + 1]);
      } else {
        *reinterpret_cast<uint32_t*>(to + 8 * h * kStride) = Pack(c[2 * h], c[2 * h + 1]);
      }
    }
  }

  // The same for a tile that will only be an operand. f32: the columns 2 t + e of each 8 are put at t + 4 e, which
  // gives its rows as A the k of ColumnsAsB (and permutes its columns as A: LaneRowOfColumns).
  __device__ __forceinline__ void PutOperand(int row, int column, const float (&c)[4]) {
    if constexpr (kDType == DType::kF32) {
      const int lane = threadIdx.x % 32;
      float* to = reinterpret_cast<float*>(bytes + (row + lane / 4) * kStride) + column + lane % 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i / 2 * 8 * (kStride / 4) + i % 2 * 4] = Rounded(c[i]);
    } else {
      Put(row, column, c);
    }
  }

  // A(m, k) = tile(row + m, kStep step + k)
  __device__ __forceinline__ OperandA RowsAsA(int row, int step) const {
    uint32_t x[4];
    Ldmatrix(x, Address16x2() + row * kStride + step * 32);
    return OperandA::Of(x);
  }

  // B(k, n) = tile(row + n, kStep step + k), for n < 8 and for 8 <= n < 16.
  __device__ __forceinline__ void RowsAsB(OperandB (&b)[2], int row, int step) const {
    uint32_t x[4];
    Ldmatrix(x, Address8x2x8() + row * kStride + step * 32);
    Halves(b, x);
  }

  // A(m, k) = tile(row + k, column + m), f32: k permuted
  __device__ __forceinline__ OperandA ColumnsAsA(int row, int column) const {
    uint32_t x[4];
    if constexpr (kDType == DType::kF32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = Single(row + i / 2, column + i % 2 * 8);
    } else {
      LdmatrixTransposed(x, Address8x2x8() + row * kStride + column * kElementBytes);
    }
    return OperandA::Of(x);
  }

  // B(k, n) = tile(row + k, column + n), for n < 8 and for 8 <= n < 16; f32: k permuted
  __device__ __forceinline__ void ColumnsAsB(OperandB (&b)[2], int row, int column) const {
    uint32_t x[4];
    if constexpr (kDType == DType::kF32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = Single(row + i % 2, column + i / 2 * 8);
    } else {
      LdmatrixTransposed(x, Address16x2() + row * kStride + column * kElementBytes);
    }
    Halves(b, x);
  }

 private:
  // The chunks of a row and of every few rows that are this thread's: from (row, chunk) on, at distances that are the
  // same for all threads.
  template <int kThreads>
  struct Share {
    static constexpr int kLanes = kChunks % 32 == 0 ? 32 : kChunks & -kChunks, kPass = kThreads / kLanes;
    const int row = threadIdx.x / kLanes, chunk = threadIdx.x % kLanes;
    const int offset = row * kStride + chunk * 16;

    template <int kAtOnce = kRows, typename Function>
    __device__ __forceinline__ void ForEach(Function function) const {
#pragma unroll kAtOnce
      for (int r = 0; r < kRows; r += kPass) {
        if (kRows % kPass != 0 && row + r >= kRows) break;
#pragma unroll
        for (int c = 0; c < kChunks; c += kLanes) function(r, c, c + kLanes <= kFilled || chunk + c < kFilled);
      }
    }
  };

  __device__ __forceinline__ static void Halves(OperandB (&b)[2], const uint32_t (&x)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t y[2] = {x[2 * half], x[2 * half + 1]};
      b[half] = OperandB::Of(y);
    }
  }

  // The address that this lane gives for the matrices (rows 0-7, chunk 0), (rows 8-15, chunk 0), (rows 0-7, chunk 1),
  // (rows 8-15, chunk 1).
  __device__ __forceinline__ uint32_t Address16x2() const {
    const int lane = threadIdx.x % 32;
    return SharedAddress(bytes) + lane % 16 * kStride + lane / 16 * 16;
  }
  // The same for the matrices (rows 0-7, chunk 0), (rows 0-7, chunk 1), (rows 8-15, chunk 0), (rows 8-15, chunk 1).
  __device__ __forceinline__ uint32_t Address8x2x8() const {
    const int lane = threadIdx.x % 32;
    return SharedAddress(bytes) + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 16;
  }
  // f32: row 2 (l % 4), column l / 4.
  __device__ __forceinline__ uint32_t Single(int row, int column) const {
    const int lane = threadIdx.x % 32;
    return LoadShared(SharedAddress(bytes) + lane % 4 * 2 * kStride + lane / 4 * 4 + row * kStride + column * 4);
  }
};

// 16 kCount rows of a tile from `row` on. The first steps of k are held in registers, as many as kHeld (or all), the
// others are read every time.
template <typename Tile, int kCount, int kHeld>
struct WarpRows {
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kHeldSteps = kHeld < 0 ? 0 : kHeld < kSteps ? kHeld : kSteps;
  const Tile& tile;
  const int row;
  OperandA held[kCount][kHeldSteps + 1];

  __device__ __forceinline__ WarpRows(const Tile& tile, int row) : tile(tile), row(row) {}
  // Called once the tile is there.
  __device__ __forceinline__ void Take() {
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
#pragma unroll
      for (int s = 0; s < kHeldSteps; ++s) held[m][s] = tile.RowsAsA(row + 16 * m, s);
    }
  }
  __device__ __forceinline__ OperandA RowsAsA(int i, int step) const {
    return step < kHeldSteps ? held[i / 16][step] : tile.RowsAsA(row + i, step);
  }
};

template <int kCount, int kChunks>
__device__ __forceinline__ void Clear(float (&C)[kCount][kChunks][4]) {
#pragma unroll
  for (int i = 0; i < kCount * kChunks * 4; ++i) C[i / 4 / kChunks][i / 4 % kChunks][i % 4] = 0.0f;
}

// What most products have between their steps.
struct Nothing {
  __device__ __forceinline__ void operator()(int, int) const {}
};

// C += A B^T: this warp's rows of A from `i` on, the rows of B from `j` on.
template <int kCount, int kChunks, typename TileA, typename TileB, typename Between = Nothing>
__device__ __forceinline__ void AddRowsTimesRows(float (&C)[kCount][kChunks][4], const TileA& a, int i, const TileB& b,
                                                 int j, const Between& between = {}) {
  static_assert(TileA::kSteps == TileB::kSteps && kChunks % 2 == 0);
  constexpr int kFirst = TileA::kSteps / 2;  // step with a part: before, operands need the registers
#pragma unroll kUnroll
  for (int s = 0; s < TileA::kSteps; ++s) {
    OperandA x[kCount];
#pragma unroll
    for (int m = 0; m < kCount; ++m) x[m] = a.RowsAsA(i + 16 * m, s);
#pragma unroll
    for (int n = 0; n < kChunks / 2; ++n) {
      OperandB y[2];
      b.RowsAsB(y, j + 16 * n, s);
#pragma unroll
      for (int m = 0; m < kCount; ++m) {
        Mma(C[m][2 * n], x[m], y[0]);
        Mma(C[m][2 * n + 1], x[m], y[1]);
      }
    }
    if (!kThreeProducts && s >= kFirst) between(s - kFirst, TileA::kSteps - kFirst);
  }
  if (kThreeProducts) between(0, 1);
}

// C += P B.
template <int kCount, int kChunks, int kInner, typename TileB>
__device__ __forceinline__ void AddTimesRows(float (&C)[kCount][kChunks][4], const float (&P)[kCount][kInner][4],
                                             const TileB& b) {
  static_assert(kChunks % 2 == 0);
#pragma unroll
  for (int s = 0; s < kInner * 8 / kStep; ++s) {
    OperandA x[kCount];
#pragma unroll
    for (int m = 0; m < kCount; ++m) x[m] = ToOperand(P[m], s);
#pragma unroll
    for (int n = 0; n < kChunks / 2; ++n) {
      if (kThreeProducts && Never()) return;
      OperandB y[2];
      b.ColumnsAsB(y, s * kStep, 16 * n);
#pragma unroll
      for (int m = 0; m < kCount; ++m) {
        Mma(C[m][2 * n], x[m], y[0]);
        Mma(C[m][2 * n + 1], x[m], y[1]);
      }
    }
  }
}

// C += A B, over kSteps steps of k: operand(m, s) is step s of rows 16 m to 16 m + 15 of A; of B the columns from
// `column` on. C may be wider than what is left of B: those columns stay as they are.
template <int kSteps, int kCount, int kChunks, typename OperandAt, typename TileB, typename Between = Nothing>
__device__ __forceinline__ void AddOperandsTimesRows(float (&C)[kCount][kChunks][4], OperandAt operand, const TileB& b,
                                                     int column, const Between& between = {}) {
  static_assert(kSteps * kStep == TileB::kHeight && kChunks % 2 == 0);
#pragma unroll kUnroll
  for (int s = 0; s < kSteps; ++s) {
    OperandA x[kCount];
#pragma unroll
    for (int m = 0; m < kCount; ++m) x[m] = operand(m, s);
#pragma unroll
    for (int n = 0; n < kChunks / 2; ++n) {
      if (TileB::kWidth % (8 * kChunks) != 0 && column + 16 * n >= TileB::kWidth) break;
      OperandB y[2];
      b.ColumnsAsB(y, s * kStep, column + 16 * n);
#pragma unroll
      for (int m = 0; m < kCount; ++m) {
        Mma(C[m][2 * n], x[m], y[0]);
        Mma(C[m][2 * n + 1], x[m], y[1]);
      }
    }
    if (!kThreeProducts) between(s, kSteps);
  }
  if (kThreeProducts) between(0, 1);
}

// C += A^T B: this warp's columns of A from `i` on, the columns of B from `column` on, over all rows of both.
template <int kCount, int kChunks, typename TileA, typename TileB, typename Between = Nothing>
__device__ __forceinline__ void AddColumnsTimesRows(float (&C)[kCount][kChunks][4], const TileA& a, int i,
                                                    const TileB& b, int column, const Between& between = {}) {
  static_assert(TileA::kHeight == TileB::kHeight);
  AddOperandsTimesRows<TileA::kHeight / kStep>(
      C, [&](int m, int s) { return a.ColumnsAsA(s * kStep, i + 16 * m); }, b, column, between);
}

// C += A B: this warp's rows of A from `i` on, filled by PutOperand, the columns of B from `column` on.
template <int kCount, int kChunks, typename TileA, typename TileB>
__device__ __forceinline__ void AddTileTimesRows(float (&C)[kCount][kChunks][4], const TileA& a, int i, const TileB& b,
                                                 int column) {
  static_assert(TileA::kWidth == TileB::kHeight);
  AddOperandsTimesRows<TileA::kSteps>(C, [&](int m, int s) { return a.RowsAsA(i + 16 * m, s); }, b, column);
}

// Which of the rows i, ..., i + 7 of A^T B a lane holds in row lane / 4 of an accumulator, where A was filled by
// PutOperand.
__device__ __forceinline__ int LaneRowOfColumns() {
  const int row = threadIdx.x % 32 / 4;
  return kDType == DType::kF32 ? row % 4 * 2 + row / 4 : row;
}

}  // namespace jax_flash::ampere
