// What the values of a score program's instructions can be in a whole block, so that a mask_mod that is decided there
// is not asked entry by entry.
#pragma once

#include "common/program.h"

namespace jax_flash {

// low <= x <= high, of a truth value 0 or 1. A float may be NaN or infinite where both ends are NaN, and only there: a
// comparison with such an end does not hold, so that nothing follows from it.
struct Range {
  double low, high;
};

// The range of values of a type between these two. If they are beyond the type's it is all values, since integers wrap
// around.
Range RangeBetween(Type type, double low, double high);

// The range of an instruction's value, where its operands (at most three) are in these ranges and floats are of type A.
// It may be wider than it has to be.
template <typename A>
Range RangeOf(const Instruction& instruction, const Range* operands);

}  // namespace jax_flash
