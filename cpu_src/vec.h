// Vectors of the accumulation dtype, by the vector extensions of GCC and Clang. The same source serves every
// instruction set.
//
// Every file that includes this one is compiled once for each instruction set, with JAX_FLASH_ISA as the namespace of
// its definitions. It must not use inline functions with external linkage from elsewhere, such as std containers: the
// linker keeps one copy of them, which may have instructions that this processor lacks.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef JAX_FLASH_ISA
#error "compile with -DJAX_FLASH_ISA=portable|avx2|avx512"
#endif

namespace jax_flash::JAX_FLASH_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename A>
struct VecTypes;
template <>
struct VecTypes<float> {
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t UInt __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecTypes<double> {
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t UInt __attribute__((vector_size(kVectorBytes)));
};
template <typename A>
using Vec = typename VecTypes<A>::Vec;  // of floats or doubles
template <typename A>
using IntVec = typename VecTypes<A>::Int;  // the same number of integers of the same size
template <typename A>
using UIntVec = typename VecTypes<A>::UInt;
using U32Vec = UIntVec<float>;

template <typename A>
constexpr int kLanes = kVectorBytes / int(sizeof(A));

template <typename A>
constexpr A kInfinity = A(__builtin_huge_val());

template <typename A>
inline Vec<A> Load(const A* p) {
  Vec<A> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <typename A>
inline void Store(A* p, Vec<A> v) {
  std::memcpy(p, &v, sizeof(v));
}

template <typename A>
inline Vec<A> Broadcast(A x) {
  return x - Vec<A>{};  // not x + 0, which turns -0 into 0
}

template <typename To, typename From>
inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Returns b if either is NaN.
template <typename V>
inline V Max(V a, V b) {
  return a > b ? a : b;
}

// Selects lanes I of a and b, numbered consecutively. GCC before 12 lacks __builtin_shufflevector.
template <int... I, typename V>
inline V Shuffle(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, decltype(a < b){I...});
#endif
}

// Reverses the lanes.
template <typename V, size_t... I>
inline V Reversed(V x, std::index_sequence<I...>) {
  return Shuffle<(sizeof...(I) - 1 - I)...>(x, x);
}

template <typename V>
inline V Reversed(V x) {
  return Reversed(x, std::make_index_sequence<sizeof(V) / sizeof(x[0])>());
}

// Row i, lane j becomes row j, lane i: each of log2(lanes) perfect shuffles interleaves the two halves of the rows.
template <typename A, size_t... I>
inline void Transpose(Vec<A>* rows, std::index_sequence<I...>) {
  constexpr int n = kLanes<A>;
  for (int step = 1; step < n; step *= 2) {
    Vec<A> next[n];
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i) {
      const Vec<A> a = rows[i], b = rows[i + n / 2];
      next[2 * i] = Shuffle<(I % 2 * n + I / 2)...>(a, b);
      next[2 * i + 1] = Shuffle<(I % 2 * n + (I + n) / 2)...>(a, b);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) rows[i] = next[i];
  }
}

template <typename A>
inline void Transpose(Vec<A> (&rows)[kLanes<A>]) {
  Transpose<A>(rows, std::make_index_sequence<kLanes<A>>());
}

// exp(x) - 1 = power (1 + series r) - 1, for x <= 1: n = round(x / ln 2), r = x - n ln 2, power = 2^n.
// Adding `magic` rounds and leaves n + bias in the low bits.
template <typename A>
struct Exponential {
  Vec<A> power, series, r;
};

// (exp(r) - 1) / r for |r| <= ln 2 / 2.
inline Vec<float> ExpSeries(Vec<float> r) {
  Vec<float> p = r * 0.0013836835278198123f + 0.008374824188649654f;
  p = p * r + 0.04166822507977486f;
  p = p * r + 0.16666419804096222f;
  p = p * r + 0.49999991059303284f;
  return p * r + 1.0f;
}

inline Vec<double> ExpSeries(Vec<double> r) {
  Vec<double> p = r * (1.0 / 6227020800) + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  return p * r + 1.0;
}

inline Exponential<float> Exponentiate(Vec<float> x) {
  constexpr float magic = 12582912 + 127;  // 1.5 * 2^23 + bias
  const Vec<float> t = x * 1.44269504088896341f + magic;
  const Vec<float> n = t - magic;
  const Vec<float> r = x - n * 0.693147180559945309f;
  return {BitCast<Vec<float>>(BitCast<IntVec<float>>(t) << 23), ExpSeries(r), r};
}

inline Exponential<double> Exponentiate(Vec<double> x) {
  constexpr double magic = 6755399441055744 + 1023;  // 1.5 * 2^52 + bias
  const Vec<double> t = x * 1.44269504088896340736 + magic;
  const Vec<double> n = t - magic;
  const Vec<double> r = x - n * 6.93145751953125e-1 - n * 1.42860682030941723212e-6;
  return {BitCast<Vec<double>>(BitCast<IntVec<double>>(t) << 52), ExpSeries(r), r};
}

// exp(x) for x <= 1, to 1-2 units in the last place (3 near the smallest float). Subnormal results are flushed to 0.
// NaN stays NaN.
template <typename A>
inline Vec<A> Exp(Vec<A> x) {
  const Exponential<A> e = Exponentiate(x);
  constexpr A smallest = sizeof(A) == 8 ? A(-708.396418532264) : A(-87.336544);
  return x < smallest ? Vec<A>{} : (e.series * e.r + 1) * e.power;
}

// tanh(x) = (1 - exp(-2x)) / (1 + exp(-2x)), computed by exp - 1 to keep precision near 0.
template <typename A>
inline Vec<A> Tanh(Vec<A> x) {
  Vec<A> size = x < 0 ? -x : x;
  size = size > 20 ? Vec<A>{} + 20 : size;  // tanh is 1 there
  const Exponential<A> e = Exponentiate(size * -2);
  const Vec<A> expm1 = e.series * e.r * e.power + (e.power - 1);
  const Vec<A> t = expm1 / (expm1 + 2);
  return x < 0 ? t : -t;
}

// The high and low halves of a * m, from 64-bit products of the even and the odd lanes.
inline void MultiplyWide(U32Vec a, uint32_t m, U32Vec* high, U32Vec* low) {
  typedef uint64_t U64Vec __attribute__((vector_size(kVectorBytes)));
  const U64Vec wide = BitCast<U64Vec>(a);
#if defined(__AVX512F__)
  // GCC 12 warns about its own _mm512_mul_epu32.
  const auto multiply = [m](U64Vec x) {
    return (U64Vec)_mm512_maskz_mul_epu32(0xFF, (__m512i)x, _mm512_set1_epi64(m));
  };
#elif defined(__AVX2__)
  const auto multiply = [m](U64Vec x) { return (U64Vec)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(m)); };
#else
  const auto multiply = [m](U64Vec x) { return (x & 0xFFFFFFFFu) * uint64_t(m); };
#endif
  const U64Vec even = multiply(wide), odd = multiply(wide >> 32);
  *high = BitCast<U32Vec>((even >> 32) | (odd & ~uint64_t(0xFFFFFFFFu)));
  *low = BitCast<U32Vec>((even & 0xFFFFFFFFu) | (odd << 32));
}

// The 16-bit floats, and conversions of all four dtypes to and from the accumulation dtype A.
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

// Only integer and float operations that every vector unit has, so compilers vectorize loops over them.
inline float ToFloat(BF16 x) { return BitCast<float>(uint32_t(x.bits) << 16); }
inline float ToFloat(F16 x) {
  const uint32_t magnitude = x.bits & 0x7FFFu, sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + 0x38000000u;  // from a bias of 15 to one of 127
  const uint32_t infinite = magnitude >= 0x7C00u ? 0x38000000u : 0u;
  // A subnormal is the last bits of 0.5 + x. XLA's threads flush subnormal floats to 0, so none may occur here.
  const uint32_t small = BitCast<uint32_t>(BitCast<float>(magnitude | 0x3F000000u) - 0.5f);
  return BitCast<float>((magnitude < 0x0400u ? small : normal + infinite) | sign);
}
inline float ToFloat(float x) { return x; }

template <typename A, typename S>
inline A To(S x) {
  if constexpr (sizeof(S) == 8) {
    return A(x);
  } else {
    return A(ToFloat(x));
  }
}

// Rounds to nearest even.
template <typename A>
inline void From(A x, float* to) {
  *to = float(x);
}
template <typename A>
inline void From(A x, double* to) {
  *to = double(x);
}
inline void From(float x, BF16* to) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  to->bits = uint16_t(x != x ? bits >> 16 | 0x40u : rounded);
}
inline void From(float x, F16* to) {
  const uint32_t bits = BitCast<uint32_t>(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  // Subnormal: adding 0.5 rounds at the last bit of a half.
  const uint32_t small = BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
  const uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const uint32_t large = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;  // NaN, infinity
  to->bits = uint16_t(sign | (magnitude >= 0x477FF000u ? large : finite));
}

}  // namespace jax_flash::JAX_FLASH_ISA
