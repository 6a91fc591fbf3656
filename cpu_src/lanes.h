// The functions of common/ops.h on vectors. Values of every type have the same number of lanes as a vector of the
// accumulation dtype A. Errors are at most a few units in the last place. Functions of the C library are computed lane
// by lane.
#pragma once

#include <type_traits>

#include "common/ops.h"
#include "cpu_src/vec.h"

namespace jax_flash::JAX_FLASH_ISA {

template <typename A>
struct Lanes {
  typedef int32_t Signed __attribute__((vector_size(4 * kLanes<A>)));
  typedef uint32_t Unsigned __attribute__((vector_size(4 * kLanes<A>)));
  typedef float Single __attribute__((vector_size(4 * kLanes<A>)));
};

// The vector and the element of a type. A truth value has all bits set or none.
template <typename A, Type type>
struct Typed {
  using Element = std::conditional_t<type == Type::f, A, std::conditional_t<type == Type::u, uint32_t, int32_t>>;
  using Vector =
      std::conditional_t<type == Type::f, Vec<A>,
                         std::conditional_t<type == Type::u, typename Lanes<A>::Unsigned, typename Lanes<A>::Signed>>;
};

template <typename V>
using ElementOf = std::decay_t<decltype(std::declval<V&>()[0])>;
// The accumulation dtype for a vector of 32-bit integers.
template <typename V>
using FloatOf = std::conditional_t<sizeof(V) == kVectorBytes, float, double>;

// Calls f for every lane. The lanes are in arrays, because compilers vectorize loops over arrays if f is arithmetic.
template <typename V, typename F>
inline V PerLane(V x, V y, F f) {
  constexpr int kCount = sizeof(V) / sizeof(ElementOf<V>);
  ElementOf<V> a[kCount], b[kCount];
  std::memcpy(a, &x, sizeof(V));
  std::memcpy(b, &y, sizeof(V));
  for (int lane = 0; lane < kCount; ++lane) a[lane] = f(a[lane], b[lane]);
  std::memcpy(&x, a, sizeof(V));
  return x;
}
template <typename V, typename F>
inline V PerLane(V x, F f) {
  return PerLane(x, x, [f](ElementOf<V> a, ElementOf<V>) { return f(a); });
}

// --- Truth values ---

// Converts the result of a float comparison, which has the floats' size, to truth values, and the inverse.
template <typename V>
inline auto Truth(V comparison) {
  if constexpr (sizeof(comparison[0]) == 4) {
    return BitCast<Lanes<float>::Signed>(comparison);
  } else {
    return __builtin_convertvector(comparison, Lanes<double>::Signed);
  }
}
template <typename V>
inline auto OfTruth(V truth) {
  return __builtin_convertvector(truth, IntVec<FloatOf<V>>);
}

// --- Integers ---

template <typename V>
inline auto Bits(V x) {
  return BitCast<typename Lanes<FloatOf<V>>::Unsigned>(x);
}

// Integer division. Division by zero gives -1, with all bits set.
template <typename V>
inline V Quotient(V x, V y) {
  using T = ElementOf<V>;
  return PerLane(x, y, [](T a, T b) -> T {
    if (b == 0) return T(-1);
    if (std::is_signed_v<T> && b == T(-1)) return T(0u - uint32_t(a));  // the lowest integer has no negation
    return a / b;
  });
}

template <typename V>
inline auto ShiftLeft(V x, V y) {
  const auto by = Bits(y);
  return by < 32 ? Bits(x) << (by & 31) : by - by;
}

template <typename V>
inline V ShiftRight(V x, V y) {
  const auto by = Bits(y);
  if constexpr (std::is_signed_v<ElementOf<V>>) {
    return x >> BitCast<V>(by < 32 ? by : by - by + 31);
  } else {
    return by < 32 ? x >> (by & 31) : by - by;
  }
}

template <typename U>
inline U CountOnes(U x) {
  x -= (x >> 1) & 0x55555555u;
  x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
  x = (x + (x >> 4)) & 0x0F0F0F0Fu;
  return (x * 0x01010101u) >> 24;
}

template <typename U>
inline U CountLeadingZeros(U x) {
  for (int shift = 1; shift < 32; shift *= 2) x |= x >> shift;
  return CountOnes(~x);
}

// --- Conversions ---

template <typename V>
inline auto ToFloats(V x) {
  return __builtin_convertvector(x, Vec<FloatOf<V>>);
}

template <typename V>
inline auto ToSigned(V x) {
  using A = ElementOf<V>;
  using Signed = typename Lanes<A>::Signed;
  constexpr A kMin = A(-2147483648.0), kMax = sizeof(A) == 4 ? A(2147483520.0) : A(2147483647.0);
  V inside = x > kMin ? x : V{} + kMin;
  inside = inside < kMax ? inside : V{} + kMax;
  const Signed integers = __builtin_convertvector(x == x ? inside : V{}, Signed);
  return Truth(x >= A(2147483648.0)) ? Signed{} + 2147483647 : integers;
}

template <typename V>
inline auto ToUnsigned(V x) {
  typename Lanes<ElementOf<V>>::Unsigned integers;
  for (int lane = 0; lane < kLanes<ElementOf<V>>; ++lane) {
    integers[lane] = x[lane] >= 4294967296.0 ? 0xFFFFFFFFu : x[lane] > 0 ? uint32_t(int64_t(x[lane])) : 0u;
  }
  return integers;
}

// By vectors: GCC 12 drops a conversion from double to float and back if it is done lane by lane.
template <typename V>
inline auto ToSingle(V x) {
  return __builtin_convertvector(x, typename Lanes<ElementOf<V>>::Single);
}

// Rounds x to floats, to odd. A second rounding then gives the same result as a single rounding of x.
inline Vec<float> RoundToOdd(Vec<float> x) { return x; }
inline auto RoundToOdd(Vec<double> x) {
  const auto nearest = ToSingle(x);
  const Vec<double> back = __builtin_convertvector(nearest, Vec<double>);
  const auto beyond = Truth((back > x) & (x > 0)) | Truth((back < x) & (x < 0)), inexact = Truth(back != x);
  const auto bits = BitCast<Lanes<double>::Signed>(nearest);
  return BitCast<Lanes<double>::Single>(inexact ? (bits + beyond) | 1 : bits);  // a NaN stays one
}

template <typename S, typename V>
inline V RoundTo(V x) {
  if constexpr (sizeof(S) == 4) {
    return __builtin_convertvector(ToSingle(x), V);
  } else {
    const auto rounded = PerLane(RoundToOdd(x), [](float a) {
      S to;
      From(a, &to);
      return ToFloat(to);
    });
    return __builtin_convertvector(rounded, V);
  }
}

// --- Floats ---

template <typename V>
inline V Abs(V x) {
  using Bits = IntVec<ElementOf<V>>;
  return BitCast<V>(BitCast<Bits>(x) & ~BitCast<Bits>(-V{}));
}

// x, which is not negative, with the sign of `other`.
template <typename V>
inline V WithSign(V x, V other) {
  using Bits = IntVec<ElementOf<V>>;
  return BitCast<V>(BitCast<Bits>(x) | (BitCast<Bits>(other) & BitCast<Bits>(-V{})));
}

// Half to even. There are no fractions above 2^23, or 2^52.
template <typename V>
inline V RoundHalfEven(V x) {
  constexpr ElementOf<V> kWhole = sizeof(x[0]) == 4 ? 0x1p23 : 0x1p52;
  const V size = Abs(x);
  return WithSign(size < kWhole ? (size + kWhole) - kWhole : size, x);
}

template <typename V>
inline V RoundHalfAway(V x) {
  const V size = Abs(x), even = RoundHalfEven(size);
  return WithSign(size - even == ElementOf<V>(0.5) ? even + 1 : even, x);
}

template <typename V>
inline V Floor(V x) {
  const V even = RoundHalfEven(x);
  return even > x ? even - 1 : even;
}

// 2^n x, where 2^n itself may overflow or underflow.
template <typename A>
inline Vec<A> Scale(Vec<A> x, IntVec<A> n) {
  constexpr int kBias = sizeof(A) == 4 ? 127 : 1023, kMantissa = sizeof(A) == 4 ? 23 : 52;
  const IntVec<A> half = n >> 1;
  return x * BitCast<Vec<A>>((half + kBias) << kMantissa) * BitCast<Vec<A>>((n - half + kBias) << kMantissa);
}

// The nearest integer to x, as a float and as an integer.
template <typename A>
struct Nearest {
  Vec<A> value;
  IntVec<A> integer;

  explicit Nearest(Vec<A> x) {
    constexpr A kMagic = sizeof(A) == 4 ? A(12582912) : A(6755399441055744);  // 1.5 * 2^23, 1.5 * 2^52
    const Vec<A> t = x + kMagic;
    value = t - kMagic;
    integer = BitCast<IntVec<A>>(t) - BitCast<IntVec<A>>(Broadcast(kMagic));
  }
};

// Clamps x to the range in which the exponential is neither 0 nor infinite.
template <typename V>
inline V Clamped(V x, ElementOf<V> least, ElementOf<V> most) {
  x = x < least ? V{} + least : x;
  return x > most ? V{} + most : x;
}

template <typename V>
inline V UnboundedExp(V x) {
  using A = ElementOf<V>;
  constexpr A kHigh = sizeof(A) == 4 ? A(0.693359375) : A(6.93145751953125e-1);
  constexpr A kLow = sizeof(A) == 4 ? A(-2.12194440e-4) : A(1.42860682030941723212e-6);
  x = sizeof(A) == 4 ? Clamped(x, A(-105), A(90)) : Clamped(x, A(-750), A(711));
  const Nearest<A> n(x * A(1.44269504088896340736));
  const V r = x - n.value * kHigh - n.value * kLow;
  return Scale<A>(ExpSeries(r) * r + 1, n.integer);
}

template <typename V>
inline V Exp2(V x) {
  using A = ElementOf<V>;
  x = sizeof(A) == 4 ? Clamped(x, A(-152), A(130)) : Clamped(x, A(-1080), A(1026));
  const Nearest<A> n(x);
  const V r = (x - n.value) * A(0.693147180559945309417);
  return Scale<A>(ExpSeries(r) * r + 1, n.integer);
}

template <typename V>
inline V Expm1(V x) {
  const auto e = Exponentiate(x);
  const V near = e.series * e.r * e.power + (e.power - 1);
  return Abs(x) < ElementOf<V>(0.75) ? (x == 0 ? x : near) : UnboundedExp(x) - 1;
}

// log(1 + f) - f + f^2 / 2 = s (f^2 / 2 + R(s^2)), s = f / (2 + f)
inline Vec<float> LogSeries(Vec<float> z) {
  return z * (z * (z * (z * 0.24279078841f + 0.28498786688f) + 0.40000972152f) + 0.66666662693f);
}
inline Vec<double> LogSeries(Vec<double> z) {
  Vec<double> p = z * 1.479819860511658591e-01 + 1.531383769920937332e-01;
  p = p * z + 1.818357216161805012e-01;
  p = p * z + 2.222219843214978396e-01;
  p = p * z + 2.857142874366239149e-01;
  p = p * z + 3.999999999940941908e-01;
  p = p * z + 6.666666666666735130e-01;
  return p * z;
}

template <typename V>
inline V Log(V x) {
  using A = ElementOf<V>;
  constexpr int kMantissa = sizeof(A) == 4 ? 23 : 52;
  constexpr A kHigh = sizeof(A) == 4 ? A(6.9313812256e-01) : A(6.93147180369123816490e-01);
  constexpr A kLow = sizeof(A) == 4 ? A(9.0580006145e-06) : A(1.90821492927058770002e-10);
  constexpr A kSmallest = sizeof(A) == 4 ? A(0x1p-126) : A(0x1p-1022), kUp = sizeof(A) == 4 ? A(0x1p23) : A(0x1p52);
  const IntVec<A> subnormal = x < kSmallest;
  // Differences of bits are unsigned: for a small negative x, or -0, they are below any signed integer.
  const UIntVec<A> bits = BitCast<UIntVec<A>>(subnormal ? x * kUp : x);
  const UIntVec<A> root = BitCast<UIntVec<A>>(Broadcast(A(0.707106781186547524)));
  // x = 2^n m, m between the roots of 1/2 and 2.
  const IntVec<A> n = BitCast<IntVec<A>>(bits - root) >> kMantissa;
  const V f = BitCast<V>(bits - (BitCast<UIntVec<A>>(n) << kMantissa)) - 1;
  const V e = __builtin_convertvector(n - (subnormal & kMantissa), V);
  const V s = f / (f + 2), half = f * f * A(0.5);
  const V log = e * kHigh - ((half - (s * (half + LogSeries(s * s)) + e * kLow)) - f);
  const V special = x == 0 ? V{} - kInfinity<A> : x < 0 ? V{} + A(__builtin_nan("")) : x;
  return ((x > 0) & (x < kInfinity<A>)) ? log : special;
}

template <typename V>
inline V Log1p(V x) {
  const V u = x + 1, log = Log(u);
  const V rounded = (x - (u - 1)) / u;  // the rounding error of 1 + x
  return ((u > 0) & (u < kInfinity<ElementOf<V>>)) ? log + rounded : log;
}

#define JAX_FLASH_OF_THE_C_LIBRARY(Name, function)                  \
  inline float Name(float x) { return __builtin_##function##f(x); } \
  inline double Name(double x) { return __builtin_##function(x); }  \
  template <typename V>                                             \
  inline V Name(V x) {                                              \
    return PerLane(x, [](ElementOf<V> a) { return Name(a); });      \
  }
JAX_FLASH_OF_THE_C_LIBRARY(Erf, erf)
JAX_FLASH_OF_THE_C_LIBRARY(Erfc, erfc)
JAX_FLASH_OF_THE_C_LIBRARY(Sin, sin)
JAX_FLASH_OF_THE_C_LIBRARY(Cos, cos)
JAX_FLASH_OF_THE_C_LIBRARY(Sqrt, sqrt)
#undef JAX_FLASH_OF_THE_C_LIBRARY

#define JAX_FLASH_OF_THE_C_LIBRARY(Name, function)                                   \
  inline float Name(float x, float y) { return __builtin_##function##f(x, y); }      \
  inline double Name(double x, double y) { return __builtin_##function(x, y); }      \
  template <typename V>                                                              \
  inline V Name(V x, V y) {                                                          \
    return PerLane(x, y, [](ElementOf<V> a, ElementOf<V> b) { return Name(a, b); }); \
  }
JAX_FLASH_OF_THE_C_LIBRARY(Pow, pow)
JAX_FLASH_OF_THE_C_LIBRARY(Atan2, atan2)
JAX_FLASH_OF_THE_C_LIBRARY(Fmod, fmod)
#undef JAX_FLASH_OF_THE_C_LIBRARY

}  // namespace jax_flash::JAX_FLASH_ISA
