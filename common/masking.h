// Which keys a query row may attend to by positions: causal, window, lengths and query offset; or lengths and a range
// of keys for each row. Segment ids and the mask operand are tested entry by entry instead.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace jax_flash {

// Keys lo <= j < hi. Empty if lo >= hi.
struct KeyRange {
  int64_t lo, hi;
};

// Rows lo <= i < hi. Empty if lo >= hi.
struct RowRange {
  int64_t lo, hi;
};

// The positional masks of one sequence of the batch. `q_length` and `kv_length` are within [0, T] and [0, S].
struct Positions {
  int64_t q_length, kv_length, offset;
  bool causal;
  int64_t window_left, window_right;  // -1: unbounded
  // If `ranges`, only these pairs and the lengths decide. They hold the first and last + 1 of the keys that each row
  // sees, and of the rows that see each key. Both numbers never decrease from one row, or key, to the next.
  bool ranges = false;
  const int32_t *keys_of_rows = nullptr, *rows_of_keys = nullptr;
};

JAX_FLASH_STATIC_HOST_DEVICE int64_t ClampLength(int64_t length, int64_t size) {
  return length < 0 ? 0 : length < size ? length : size;
}

// Pair i, clamped to [0, size]. Bad numbers cannot cause reads outside the arrays. It uses 32 bits, for GPUs.
template <typename Range>
JAX_FLASH_STATIC_HOST_DEVICE Range RangeAt(const int32_t* pairs, int64_t i, int64_t size) {
  const int32_t most = size < 0x7FFFFFFF ? int32_t(size) : 0x7FFFFFFF, lo = pairs[2 * i], hi = pairs[2 * i + 1];
  return {lo < 0 ? 0 : lo < most ? lo : most, hi < 0 ? 0 : hi < most ? hi : most};
}

// The keys that row i may attend to. Both ends grow with i, up to q_length.
JAX_FLASH_STATIC_HOST_DEVICE KeyRange RowKeys(const Positions& positions, int64_t i) {
  if (i >= positions.q_length) return {0, 0};
  if (positions.ranges) return RangeAt<KeyRange>(positions.keys_of_rows, i, positions.kv_length);
  const int64_t p = i + positions.offset;
  KeyRange keys = {0, positions.kv_length};
  if (positions.causal && p + 1 < keys.hi) keys.hi = p + 1;
  // Compared by difference: p - left or p + right + 1 could overflow.
  if (positions.window_right >= 0 && positions.window_right < keys.hi - p - 1) keys.hi = p + positions.window_right + 1;
  if (positions.window_left >= 0 && positions.window_left < p) keys.lo = p - positions.window_left;
  if (keys.hi < 0) keys.hi = 0;
  return keys;
}

// The keys that at least one of the rows i0 <= i < i1 may attend to. It may be a superset, because the rows' ranges
// need not touch.
JAX_FLASH_STATIC_HOST_DEVICE KeyRange AnyRowKeys(const Positions& positions, int64_t i0, int64_t i1) {
  if (i1 > positions.q_length) i1 = positions.q_length;
  if (i0 >= i1) return {0, 0};
  return {RowKeys(positions, i0).lo, RowKeys(positions, i1 - 1).hi};
}

// The keys that every one of the rows i0 <= i < i1 may attend to.
JAX_FLASH_STATIC_HOST_DEVICE KeyRange EveryRowKeys(const Positions& positions, int64_t i0, int64_t i1) {
  if (i0 >= i1 || i1 > positions.q_length) return {0, 0};
  return {RowKeys(positions, i1 - 1).lo, RowKeys(positions, i0).hi};
}

// The rows that see at least one of the keys j0 <= j < j1, for j0 < j1.
JAX_FLASH_STATIC_HOST_DEVICE RowRange AnyKeyRows(const Positions& positions, int64_t j0, int64_t j1) {
  RowRange rows = {0, positions.q_length};
  if (j1 > positions.kv_length) j1 = positions.kv_length;
  if (j0 >= j1) return {0, 0};
  if (positions.ranges) {
    return {RangeAt<RowRange>(positions.rows_of_keys, j0, rows.hi).lo,
            RangeAt<RowRange>(positions.rows_of_keys, j1 - 1, rows.hi).hi};
  }
  if (positions.causal && rows.lo < j0 - positions.offset) rows.lo = j0 - positions.offset;
  if (positions.window_right >= 0 && positions.window_right < j0 - positions.offset - rows.lo) {
    rows.lo = j0 - positions.offset - positions.window_right;
  }
  if (positions.window_left >= 0 && positions.window_left < rows.hi + positions.offset - j1) {
    rows.hi = positions.window_left + j1 - positions.offset;
  }
  return rows;
}

// The rows that see every one of the keys j0 <= j < j1.
JAX_FLASH_STATIC_HOST_DEVICE RowRange EveryKeyRows(const Positions& positions, int64_t j0, int64_t j1) {
  RowRange rows = {0, positions.q_length};
  if (j1 > positions.kv_length) return {0, 0};
  if (positions.ranges) {
    return {RangeAt<RowRange>(positions.rows_of_keys, j1 - 1, rows.hi).lo,
            RangeAt<RowRange>(positions.rows_of_keys, j0, rows.hi).hi};
  }
  if (positions.causal && rows.lo < j1 - 1 - positions.offset) rows.lo = j1 - 1 - positions.offset;
  if (positions.window_right >= 0 && positions.window_right < j1 - 1 - positions.offset - rows.lo) {
    rows.lo = j1 - 1 - positions.offset - positions.window_right;
  }
  if (positions.window_left >= 0 && positions.window_left < rows.hi + positions.offset - j0 - 1) {
    rows.hi = positions.window_left + j0 + 1 - positions.offset;
  }
  return rows;
}

}  // namespace jax_flash
