// Tiles: row-major matrices of the accumulation dtype in a worker's scratch, with functions on whole tiles. Rows are
// padded to whole vectors. Their stride is an odd number of cache lines, to avoid aliasing.
#pragma once

#include <type_traits>

#include "common/problem.h"
#include "cpu_src/vec.h"

namespace jax_flash::JAX_FLASH_ISA {

inline int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

template <typename A>
struct Tile {
  A* data;
  int64_t stride;  // between rows

  A* row(int64_t i) const { return data + i * stride; }
};

// Allocates aligned arrays from a block of memory. Without memory it only counts bytes.
class Carver {
 public:
  explicit Carver(char* memory) : memory_(memory) {}

  template <typename T>
  T* Array(int64_t count) {
    T* array = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += RoundUp(count * int64_t(sizeof(T)), 64);
    return array;
  }

  template <typename A>
  Tile<A> NewTile(int64_t rows, int64_t columns) {
    constexpr int64_t line = 64 / sizeof(A);
    const int64_t stride = RoundUp(columns, line) + (RoundUp(columns, line) / line % 2 == 0 ? line : 0);
    return {Array<A>(rows * stride), stride};
  }

  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// Calls `f` with a null pointer to the element type.
template <typename F>
inline void WithDType(DType dtype, F f) {
  switch (dtype) {
    case DType::kF16:
      return f(static_cast<const F16*>(nullptr));
    case DType::kBF16:
      return f(static_cast<const BF16*>(nullptr));
    case DType::kF32:
      return f(static_cast<const float*>(nullptr));
    case DType::kF64:
      return f(static_cast<const double*>(nullptr));
    case DType::kNone:
      return;
  }
}

// Rows of an array in memory: the address of the first, and the stride in elements.
struct Rows {
  void* data;
  int64_t stride;
  DType dtype;
};

inline int64_t SizeOf(DType dtype) { return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2; }

// Rows i0, i0 + 1, ... of one head of a [B, length, heads, dim] array.
inline Rows HeadRows(const void* array, DType dtype, int64_t b, int64_t i0, int64_t length, int64_t head, int64_t heads,
                     int64_t dim) {
  const int64_t element = ((b * length + i0) * heads + head) * dim;
  return {const_cast<char*>(static_cast<const char*>(array)) + element * SizeOf(dtype), heads * dim, dtype};
}

template <typename A>
inline void Zero(Tile<A> to, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) std::memset(to.row(i), 0, size_t(columns) * sizeof(A));
}

// to = factor * from, with columns up to a whole vector filled with zeros.
template <typename A>
void LoadRows(Rows from, int64_t rows, int64_t columns, A factor, Tile<A> to) {
  WithDType(from.dtype, [&](auto* type) {
    using S = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    for (int64_t i = 0; i < rows; ++i) {
      const S* source = static_cast<const S*>(from.data) + i * from.stride;
      A* row = to.row(i);
      for (int64_t c = 0; c < columns; ++c) row[c] = To<A>(source[c]) * factor;
      for (int64_t c = columns; c < RoundUp(columns, kLanes<A>); ++c) row[c] = 0;
    }
  });
}

// to = fromᵀ, with columns up to a whole vector filled with zeros.
template <typename A>
void TransposeRows(Tile<A> from, int64_t rows, int64_t columns, Tile<A> to) {
  constexpr int n = kLanes<A>;
  for (int64_t i = 0; i < rows; i += n) {
    for (int64_t c = 0; c < columns; c += n) {
      Vec<A> block[n];
      for (int k = 0; k < n; ++k) block[k] = i + k < rows ? Load(from.row(i + k) + c) : Vec<A>{};
      Transpose<A>(block);
      for (int k = 0; k < n && c + k < columns; ++k) Store(to.row(c + k) + i, block[k]);
    }
  }
}

// to = from
template <typename A>
void StoreRows(Tile<A> from, int64_t rows, int64_t columns, Rows to) {
  WithDType(to.dtype, [&](auto* type) {
    using S = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    for (int64_t i = 0; i < rows; ++i) {
      S* target = static_cast<S*>(to.data) + i * to.stride;
      const A* row = from.row(i);
      if constexpr (sizeof(A) == 4 || sizeof(S) >= 4) {  // no 16-bit results from f64
        for (int64_t c = 0; c < columns; ++c) From(row[c], &target[c]);
      }
    }
  });
}

// A tile from column c0 (a whole vector) or row r0 on.
template <typename A>
inline Tile<A> FromColumn(Tile<A> tile, int64_t c0) {
  return {tile.data + c0, tile.stride};
}
template <typename A>
inline Tile<A> FromRow(Tile<A> tile, int64_t r0) {
  return {tile.row(r0), tile.stride};
}

// The left operand of a product, which is read element by element: A, or Aᵀ with exchanged strides.
template <typename A>
struct Left {
  const A* data;
  int64_t row_stride, depth_stride;
};
template <typename A>
inline Left<A> AsIs(Tile<A> tile) {
  return {tile.data, tile.stride, 1};
}
template <typename A>
inline Left<A> Transposed(Tile<A> tile) {
  return {tile.data, 1, tile.stride};
}

// C[R rows, V vectors] (+)= A B as a sum of `depth` outer products in registers. C is added last, because a sum of
// partial sums has less rounding error than one long sum over all tiles.
template <typename A, int R, int V>
void MultiplyBlock(Left<A> left, Tile<A> right, A* c, int64_t c_stride, int64_t depth, bool accumulate) {
  const A* b = right.data;
  Vec<A> sum[R][V] = {};
  // Three rows share a pointer: two of them use an index of 1 or 2 strides.
  constexpr int kPointers = (R + 2) / 3;
  const A* a[kPointers];
#pragma GCC unroll 4
  for (int p = 0; p < kPointers; ++p) a[p] = left.data + p * 3 * left.row_stride;
  for (int64_t k = 0; k < depth; ++k) {
    Vec<A> row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) row[v] = Load(b + v * kLanes<A>);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec<A> x = Broadcast(a[r / 3][r % 3 * left.row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] += x * row[v];
    }
    b += right.stride;
#pragma GCC unroll 4
    for (int p = 0; p < kPointers; ++p) a[p] += left.depth_stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      A* const to = c + r * c_stride + v * kLanes<A>;
      Store(to, accumulate ? Load(to) + sum[r][v] : sum[r][v]);
    }
  }
}

// The number of accumulator rows that fit into registers, in addition to a row of B and an element of A.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBlockRows = 12;
#else
constexpr int kBlockRows = 6;
#endif

// C (+)= A B in blocks of R rows; returns the number of rows done. `columns` are at most two vectors.
template <typename A, int R>
inline int64_t MultiplyRows(Left<A> left, Tile<A> right, Tile<A> c, int64_t rows, int64_t columns, int64_t depth,
                            bool accumulate) {
  int64_t r = 0;
  for (; r + R <= rows; r += R) {
    const Left<A> a = {left.data + r * left.row_stride, left.row_stride, left.depth_stride};
    if (columns > kLanes<A>) {
      MultiplyBlock<A, R, 2>(a, right, c.row(r), c.stride, depth, accumulate);
    } else {
      MultiplyBlock<A, R, 1>(a, right, c.row(r), c.stride, depth, accumulate);
    }
  }
  return r;
}

enum class Into { kNew, kSum };

// C = A B, or C <- C + A B: every matrix product of both passes. Columns are computed in whole vectors.
template <typename A>
void Multiply(Left<A> left, Tile<A> right, Tile<A> c, int64_t rows, int64_t columns, int64_t depth, Into into) {
  const bool accumulate = into == Into::kSum;
  for (int64_t column = 0; column < columns; column += 2 * kLanes<A>) {
    Left<A> a = left;
    const Tile<A> b = FromColumn(right, column);
    Tile<A> to = FromColumn(c, column);
    int64_t rest = rows;
    const auto skip = [&](int64_t done) {
      a.data += done * a.row_stride;
      to = FromRow(to, done);
      rest -= done;
    };
    skip(MultiplyRows<A, kBlockRows>(a, b, to, rest, columns - column, depth, accumulate));
    skip(MultiplyRows<A, 3>(a, b, to, rest, columns - column, depth, accumulate));
    skip(MultiplyRows<A, 1>(a, b, to, rest, columns - column, depth, accumulate));
  }
}

}  // namespace jax_flash::JAX_FLASH_ISA
