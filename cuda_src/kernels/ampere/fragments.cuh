// Tiles in shared memory and a warp's fragments of them, for mma.sync. The same code serves 16-bit elements and f32.
// They differ in the k of an mma and in how transposed operands are loaded.
//
//   SharedTile<kRows, kDim>     [kRows][kDim] elements, filled by cp.async; zeros up to whole steps of k
//   Accumulator<kM, kN>         float [kM / 16][kN / 8][4]: element [m][c][2 h + e] of lane l is
//                               row 16 m + l / 4 + 8 h, column 8 c + 2 (l % 4) + e
//   OperandA, OperandB          16 x kStep of A and kStep x 8 of B, as mma.sync takes them, in any precision
//   WarpRows<Tile, kCount, kHeld>       a warp's rows of a tile as left operands, some of them kept in registers
//   AddRowsTimesRows(C, a, i, b, j)     C += A B^T: rows of two tiles (Q K^T, dO V^T, ...)
//   AddTimesRows(C, P, b)               C += P B: an accumulator times the rows of a tile (P V, dS K, ...)
//   AddRowSums(sums, P)                 sums += P 1: row sums of an accumulator
//   AddColumnsTimesRows(C, a, i, b)     C += A^T B: columns of a tile times rows of another (dK += dS^T Q, ...)
//   AddTileTimesRows(C, a, i, b)        C += A B: rows of a tile filled by PutOperand times rows of another
//
// A product can issue loads for later tiles between its steps: it calls between(part, parts) for each part. If all
// loads were issued first, the operands of the product would queue behind them. With kThreeProducts the steps are a
// loop, and `between` is called once, after it.
//
// The stride of rows is an odd number of 16-byte chunks. So the 8 rows of a matrix are in different banks, and each
// address is a register plus a constant.
//
// f32 has no transposing load. Columns of f32 tiles are read element by element, with a permutation of k that avoids
// bank conflicts. It also makes an accumulator an operand without shuffles: of 8 consecutive k, a lane has 2 (l % 4) +
// e where the mma expects l % 4 + 4 e. Products of rows with rows keep the order of k.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"

namespace jax_flash::ampere {

constexpr bool kThreeProducts = kDType == DType::kF32 && kFullPrecision;
constexpr int kUnroll =
    kThreeProducts ? 1 : 64;  // unrolled steps of k; operands in two parts leave no registers for more

__host__ __device__ constexpr int RoundUp(int x, int to) { return (x + to - 1) / to * to; }

template <int kM, int kN>
using Accumulator = float[kM / 16][kN / 8][4];

// Rounds f32 to TF32. The mma alone truncates, and errors of one sign accumulate. Tiles are rounded in shared memory,
// once for all warps that read them; accumulators are rounded when they become operands.
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

// c += a b. Full precision uses three TF32 products. They are summed separately from c, because the mma truncates its
// sums, too.
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

// Step `s` of k of an accumulator, as an operand.
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

// Predicate for rows to load: all.
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

  // Starts to load rows row0, row0 + 1, ... of a matrix in HBM with `stride` bytes between rows. Rows from `end` on,
  // and rows that are not `wanted`, become zeros. All kThreads threads call it, for the whole tile or for one of
  // `parts`. The caller commits.
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

  // The same for scattered rows: row_at(row) is the address of a row.
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

  // The same for the first `columns` columns of `wanted` rows, in one part. The other columns become zeros.
  template <int kThreads, typename RowAt, typename Wanted = AllRows>
  __device__ __forceinline__ void LoadColumns(RowAt row_at, int row0, int end, int columns, Wanted wanted = {}) {
    const Share<kThreads> share;
    const uint32_t to = SharedAddress(bytes) + share.offset;
    share.ForEach([&](int row, int chunk, bool) {
      const int r = row0 + share.row + row;
      const bool there = r < end && (share.chunk + chunk) * 16 < columns * kElementBytes && wanted(r);
      CpAsync(to + row * kStride + chunk * 16, row_at(r) + (share.chunk + chunk) * 16, there);
    });
  }

  // Called after this thread's own loads have arrived. The threads must synchronise afterwards.
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

  // Stores the rows below `end`. The threads must have synchronised.
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

  // Converts a 16 x 8 part of an accumulator, and writes it at (row, column).
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

  // The same for a tile that is only an operand. In f32, column 2 t + e of each 8 goes to t + 4 e. Then rows of the
  // tile, as A, have the permuted k of ColumnsAsB. Columns of the tile, as A, are permuted (LaneRowOfColumns).
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
  // This thread's chunks of the tile: from (row, chunk) on, at distances that are equal for all threads.
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

  // This lane's address for ldmatrix of the matrices (rows 0-7, chunk 0), (rows 8-15, chunk 0), (rows 0-7, chunk 1),
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

// 16 kCount rows of a tile, from `row` on, as left operands. The first kHeld steps of k stay in registers; the others
// are loaded each time.
template <typename Tile, int kCount, int kHeld>
struct WarpRows {
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kHeldSteps = kHeld < 0 ? 0 : kHeld < kSteps ? kHeld : kSteps;
  const Tile& tile;
  const int row;
  OperandA held[kCount][kHeldSteps + 1];

  __device__ __forceinline__ WarpRows(const Tile& tile, int row) : tile(tile), row(row) {}
  // Called after the tile has arrived.
  __device__ __forceinline__ void LoadHeld() {
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

// The default: nothing between steps.
struct NoOp {
  __device__ __forceinline__ void operator()(int, int) const {}
};

// C += A B^T, with this warp's rows of A from `i` on, and the rows of B from `j` on.
template <int kCount, int kChunks, typename TileA, typename TileB, typename Between = NoOp>
__device__ __forceinline__ void AddRowsTimesRows(float (&C)[kCount][kChunks][4], const TileA& a, int i, const TileB& b,
                                                 int j, const Between& between = {}) {
  static_assert(TileA::kSteps == TileB::kSteps && kChunks % 2 == 0);
  constexpr int kFirst = TileA::kSteps / 2;  // the first step with loads; before it, operands need the registers
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
      if (kThreeProducts && OpaqueFalse()) return;
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

// sums += P 1: row sums of an accumulator, rounded as in AddTimesRows. All columns of `sums` are equal.
template <int kCount, int kInner>
__device__ __forceinline__ void AddRowSums(float (&sums)[kCount][4], const float (&P)[kCount][kInner][4]) {
  const uint32_t one = kDType == DType::kF32 ? __float_as_uint(1.0f) : Pack(1.0f, 1.0f), pair[2] = {one, one};
  const OperandB ones = OperandB::Of(pair);
#pragma unroll
  for (int s = 0; s < kInner * 8 / kStep; ++s) {
#pragma unroll
    for (int m = 0; m < kCount; ++m) Mma(sums[m], ToOperand(P[m], s), ones);
  }
}

// C += A B over kSteps steps of k. operand(m, s) is step s of rows 16 m to 16 m + 15 of A. B starts at `column`. C may
// be wider than the rest of B; its remaining columns do not change.
template <int kSteps, int kCount, int kChunks, typename OperandAt, typename TileB, typename Between = NoOp>
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

// C += A^T B, with this warp's columns of A from `i` on, and the columns of B from `column` on, over all rows of both.
template <int kCount, int kChunks, typename TileA, typename TileB, typename Between = NoOp>
__device__ __forceinline__ void AddColumnsTimesRows(float (&C)[kCount][kChunks][4], const TileA& a, int i,
                                                    const TileB& b, int column, const Between& between = {}) {
  static_assert(TileA::kHeight == TileB::kHeight);
  AddOperandsTimesRows<TileA::kHeight / kStep>(
      C, [&](int m, int s) { return a.ColumnsAsA(s * kStep, i + 16 * m); }, b, column, between);
}

// C += A B, with this warp's rows of A from `i` on, filled by PutOperand, and the columns of B from `column` on.
template <int kCount, int kChunks, typename TileA, typename TileB>
__device__ __forceinline__ void AddTileTimesRows(float (&C)[kCount][kChunks][4], const TileA& a, int i, const TileB& b,
                                                 int column) {
  static_assert(TileA::kWidth == TileB::kHeight);
  AddOperandsTimesRows<TileA::kSteps>(C, [&](int m, int s) { return a.RowsAsA(i + 16 * m, s); }, b, column);
}

// The row among i, ..., i + 7 of A^T B that a lane holds in row lane / 4 of an accumulator, if PutOperand filled A.
__device__ __forceinline__ int LaneRowOfColumns() {
  const int row = threadIdx.x % 32 / 4;
  return kDType == DType::kF32 ? row % 4 * 2 + row / 4 : row;
}

}  // namespace jax_flash::ampere
