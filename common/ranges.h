// Interval arithmetic for score programs: bounds of an instruction's value from bounds of its operands. The CPU kernels
// use it to decide a mask_mod for a whole block. The CUDA code generator uses it to leave out clamps of indices.
#pragma once

#include "common/program.h"

namespace jax_flash {

// low <= x <= high. Truth values are 0 and 1. A float may be NaN or infinite if and only if both ends are NaN. Every
// comparison with such an end is false, so nothing follows from it.
struct Range {
  double low, high;

  bool operator==(const Range& other) const { return low == other.low && high == other.high; }
  bool IsWithin(const Range& other) const { return other.low <= low && high <= other.high; }
};

constexpr Range kTrue = {1, 1}, kFalse = {0, 0};

// The range of every value of a type.
Range EveryValue(Type type);

// The values of a type from `low` to `high`. If the type lacks some of them, it is every value: integers wrap around.
Range RangeBetween(Type type, double low, double high);

// The range of an instruction's value if its operands (at most three) are in these ranges and floats have type A. It
// may be wider than necessary.
template <typename A>
Range RangeOf(const Instruction& instruction, const Range* operands);

}  // namespace jax_flash
