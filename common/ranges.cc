#include "common/ranges.h"

#include <cfloat>
#include <cmath>

namespace jax_flash {
namespace {

// Every finite value of a type.
Range Whole(Type type) {
  switch (type) {
    case Type::i:
      return {-0x1p31, 0x1p31 - 1};
    case Type::u:
      return {0, 0x1p32 - 1};
    case Type::b:
      return {0, 1};
    default:
      return {-DBL_MAX, DBL_MAX};
  }
}

// These return NaN if either operand is NaN.
double MinOrNaN(double x, double y) { return x < y || x != x ? x : y; }
double MaxOrNaN(double x, double y) { return x > y || x != x ? x : y; }

// Same: do both ranges have a single, equal value? Disjoint: do they have no value in common?
bool Same(Range x, Range y) { return x.low == y.high && x.high == y.low; }
bool Disjoint(Range x, Range y) { return x.high < y.low || x.low > y.high; }

// The range of a truth value: always true, never true, or neither.
Range Truth(bool always, bool never) { return {double(always), double(!never)}; }

}  // namespace

Range EveryValue(Type type) { return type == Type::f ? Range{NAN, NAN} : Whole(type); }

Range RangeBetween(Type type, double low, double high) {
  const Range whole = Whole(type);
  return low >= whole.low && high <= whole.high ? Range{low, high} : EveryValue(type);
}

// Case labels for an operation on floats and both integer types, and for an operation on integers only.
#define NUMBERS(op) Op::op##_f : case INTEGERS(op)
#define INTEGERS(op) Op::op##_i : case Op::op##_u

template <typename A>
Range RangeOf(const Instruction& instruction, const Range* operands) {
  const Type type = instruction.type;
  const Range x = operands[0], y = operands[instruction.count > 1 ? 1 : 0];
  // For functions that are monotonic in each operand: the range of the values at the corners.
  const auto corners = [=](auto f) {
    if (x.low != x.low || y.low != y.low) return EveryValue(type);
    Range range = {INFINITY, -INFINITY};
    for (const double a : {x.low, x.high}) {
      for (const double b : {y.low, y.high}) {
        const double value = type == Type::f ? A(f(a, b)) : f(a, b);
        range = {MinOrNaN(range.low, value), MaxOrNaN(range.high, value)};
      }
    }
    return RangeBetween(type, range.low, range.high);
  };

  switch (instruction.op) {
    case NUMBERS(const):
    case Op::const_b: {
      const double value = type == Type::f ? A(instruction.constant) : instruction.constant;
      return RangeBetween(type, value, value);
    }
    case NUMBERS(add):
      return corners([](double x, double y) { return x + y; });
    case NUMBERS(sub):
      return corners([](double x, double y) { return x - y; });
    case NUMBERS(mul):
      return corners([](double x, double y) { return x * y; });
    case NUMBERS(neg):
      return corners([](double x, double) { return -x; });
    case NUMBERS(sign):
      return corners([](double x, double) { return (x > 0) - (x < 0); });
    case NUMBERS(abs):
      return RangeBetween(type, x.low > 0 ? x.low : x.high < 0 ? -x.high : 0, MaxOrNaN(-x.low, x.high));
    case NUMBERS(min):
    case Op::and_b:
      return {MinOrNaN(x.low, y.low), MinOrNaN(x.high, y.high)};
    case NUMBERS(max):
    case Op::or_b:
      return {MaxOrNaN(x.low, y.low), MaxOrNaN(x.high, y.high)};

    case Op::floor_f:
      return corners([](double x, double) { return std::floor(x); });
    case Op::ceil_f:
      return corners([](double x, double) { return std::ceil(x); });
    case Op::round_f:
      return corners([](double x, double) { return std::round(x); });
    case Op::rint_f:
      return corners([](double x, double) { return std::nearbyint(x); });

    case INTEGERS(div):
      if (!Disjoint(y, {0, 0})) break;
      return corners([](double x, double y) { return std::trunc(x / y); });
    case INTEGERS(rem): {
      if (y.low <= 0) break;
      const double quotient = std::trunc(x.low / y.low);
      if (y.low == y.high && std::trunc(x.high / y.low) == quotient) {
        return {x.low - quotient * y.low, x.high - quotient * y.low};
      }
      return {x.low < 0 ? MaxOrNaN(x.low, 1 - y.high) : 0, x.high > 0 ? MinOrNaN(x.high, y.high - 1) : 0};
    }
    case INTEGERS(and):
      if (x.low < 0 || y.low < 0) break;
      return {0, MinOrNaN(x.high, y.high)};
    case INTEGERS(shl):
      if (y.low < 0 || y.high > 31) break;
      return corners([](double x, double y) { return std::ldexp(x, int(y)); });
    case INTEGERS(shr):
      if (y.low < 0 || y.high > 31) break;
      return corners([](double x, double y) { return std::floor(std::ldexp(x, -int(y))); });
    case INTEGERS(not):
    case Op::not_b:
      return corners([whole = Whole(type)](double x, double) { return whole.low + whole.high - x; });
    case INTEGERS(popcount):
    case INTEGERS(clz):
      return {0, 32};

    case NUMBERS(eq):
    case Op::eq_b:
      return Truth(Same(x, y), Disjoint(x, y));
    case NUMBERS(ne):
    case Op::ne_b:
    case Op::xor_b:
      return Truth(Disjoint(x, y), Same(x, y));
    case NUMBERS(lt):
      return Truth(x.high < y.low, x.low >= y.high);
    case NUMBERS(le):
      return Truth(x.high <= y.low, x.low > y.high);
    case NUMBERS(gt):
      return Truth(x.low > y.high, x.high <= y.low);
    case NUMBERS(ge):
      return Truth(x.low >= y.high, x.high < y.low);

    case NUMBERS(select):
    case Op::select_b: {
      const Range z = operands[2];
      if (x.low == 1) return y;
      if (x.high == 0) return z;
      return {MinOrNaN(y.low, z.low), MaxOrNaN(y.high, z.high)};
    }

    case Op::cast_f_i:
    case Op::cast_f_u:
      return corners(
          [whole = Whole(type)](double x, double) { return MinOrNaN(MaxOrNaN(std::trunc(x), whole.low), whole.high); });
    case Op::cast_f_b:
    case Op::cast_i_b:
    case Op::cast_u_b:
      return Truth(Disjoint(x, kFalse), Same(x, kFalse));
    case Op::cast_i_f:
    case Op::cast_u_f:
    case Op::cast_b_f:
    case Op::cast_i_u:
    case Op::cast_u_i:
    case Op::cast_b_i:
    case Op::cast_b_u:
      return corners([](double x, double) { return x; });

    default:  // loaded values, among others
      break;
  }
  return EveryValue(type);
}

#undef NUMBERS
#undef INTEGERS

template Range RangeOf<float>(const Instruction&, const Range*);
template Range RangeOf<double>(const Instruction&, const Range*);

}  // namespace jax_flash
