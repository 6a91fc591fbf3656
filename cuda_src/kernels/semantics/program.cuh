// Score programs: a user's functions that change scores or mask entries. The host writes them as C++
// (cuda_src/program_source.h) with the functions of this file. A truth value is an int: -1 (all bits set) or 0.
#pragma once

#include "common/ops.h"
#include "config.cuh"
#include "ptx/reduce.cuh"
#include "ptx/types.cuh"
#include "semantics/tanh.cuh"

namespace jax_flash {

constexpr bool kScoreMod = kProblem.score_mod;
constexpr bool kMaskMod = kProblem.mask_mod;
constexpr bool kScoreGrad = kProblem.score_grad;
constexpr bool kScoreTangent = kProblem.score_tangent;
constexpr bool kCapturedGradients = kProblem.captured_gradients;

namespace program {

template <typename T, typename Other>
constexpr bool kSameType = false;
template <typename T>
constexpr bool kSameType<T, T> = true;

// The position of an entry: its row in this call's arrays, and the indices that programs receive. `rows` and `keys` are
// the distances from the lane's first entry, which are compile-time constants.
struct Entry {
  int row, batch, head, query, key;
  int rows = 0, keys = 0;
};

// --- Linear functions of the position ---

// A float that is linear in the position. At this entry it is first + steps * step, where `first` is its value at the
// lane's first entry. That takes one FMA per entry. Rounding `first` costs no more accuracy than rounding the value. If
// the value is small compared with `first`, the error is at most 2^-16 of a step, for a few hundred steps.
struct Ramp {
  float first, step;
  int steps;

  __device__ __forceinline__ float Here() const { return steps == 0 ? first : fmaf(step, float(steps), first); }
};

// The ramp of an int that floats represent exactly, with these steps between rows and between keys.
__device__ __forceinline__ Ramp RampOf(int x, int row_step, int key_step, const Entry& at) {
  const int steps = row_step * at.rows + key_step * at.keys;
  return {float(x - steps), 1.0f, steps};
}

// Both ramps have the same steps. A float is constant over the entries.
__device__ __forceinline__ Ramp neg_f(Ramp x) { return {-x.first, -x.step, x.steps}; }
__device__ __forceinline__ Ramp add_f(Ramp x, Ramp y) { return {x.first + y.first, x.step + y.step, x.steps}; }
__device__ __forceinline__ Ramp add_f(Ramp x, float y) { return {x.first + y, x.step, x.steps}; }
__device__ __forceinline__ Ramp add_f(float x, Ramp y) { return add_f(y, x); }
__device__ __forceinline__ Ramp sub_f(Ramp x, Ramp y) { return add_f(x, neg_f(y)); }
__device__ __forceinline__ Ramp sub_f(Ramp x, float y) { return add_f(x, -y); }
__device__ __forceinline__ Ramp sub_f(float x, Ramp y) { return add_f(x, neg_f(y)); }
__device__ __forceinline__ Ramp mul_f(Ramp x, float y) { return {x.first * y, x.step * y, x.steps}; }
__device__ __forceinline__ Ramp mul_f(float x, Ramp y) { return mul_f(y, x); }

// --- Captured arrays ---

// An index into a dimension; its last index is `last`. It is clamped, unless it is known to be in range.
template <bool kInRange>
__device__ __forceinline__ int ClampIndex(int index, int last) {
  return kInRange ? index : min(max(index, 0), last);
}

// A value that the host derived (`known`), or else the computed value.
template <bool kIsKnown>
__device__ __forceinline__ int Known(int known, int computed) {
  return kIsKnown ? known : computed;
}

struct F16 {};
struct BF16 {};

// Element `at` of a batch entry's part of an array. `at` is an int if the array is small enough.
template <typename T, typename Index>
__device__ __forceinline__ auto LoadCaptured(const void* array, int64_t batch, Index at) {
  if constexpr (kSameType<T, F16>) {
    return Load<DType::kF16>(static_cast<const uint16_t*>(array) + batch, at);
  } else if constexpr (kSameType<T, BF16>) {
    return Load<DType::kBF16>(static_cast<const uint16_t*>(array) + batch, at);
  } else {
    return __ldg(static_cast<const T*>(array) + batch + at);
  }
}

// --- Gradients of captured arrays ---

// The indices that determine the address that a program adds to: none, the query, the key, query - key, or both in
// another way (kEntries). All but kEntries are numbered sums: additions to the same address can be summed in registers
// first.
enum class SumKind { kNothing, kRows, kKeys, kDiagonals, kEntries };
struct Unsummed {};
template <int kNumber>
struct Sum {};
template <int kNumber>
constexpr SumKind kSumOver = SumKind::kEntries;  // unless this_program.h specialises it

// ScoreGrad calls a functor for each addition of x to an address, with Unsummed{}, or with the Sum of that address.
// This functor adds each entry separately, or does nothing. An entry with a cotangent of 0 adds nothing. So a NaN
// derivative of a masked entry cannot spread.
template <bool kAdds>
struct AddSeparately {
  template <typename Which, typename Index>
  __device__ __forceinline__ void operator()(Which, float cotangent, float* array, int64_t batch, Index at,
                                             float x) const {
    if (kAdds) AddToGlobalIf(cotangent != 0.0f, array + batch + at, x);
  }
};

// --- Instructions: the operations in common/ops.h ---

using A = float;
struct None {};

__device__ __forceinline__ int Truth(bool x) { return x ? -1 : 0; }
__device__ __forceinline__ int Truth(int x) { return x; }
__device__ __forceinline__ bool OfTruth(int x) { return x != 0; }
__device__ __forceinline__ float Broadcast(float x) { return x; }

__device__ __forceinline__ float Fmod(float x, float y) { return fmodf(x, y); }
__device__ __forceinline__ float Pow(float x, float y) { return powf(x, y); }
__device__ __forceinline__ float Atan2(float x, float y) { return atan2f(x, y); }
__device__ __forceinline__ float Abs(float x) { return fabsf(x); }
__device__ __forceinline__ float UnboundedExp(float x) { return expf(x); }
__device__ __forceinline__ float Exp2(float x) { return exp2f(x); }
__device__ __forceinline__ float Log(float x) { return logf(x); }
__device__ __forceinline__ float Log1p(float x) { return log1pf(x); }
__device__ __forceinline__ float Expm1(float x) { return expm1f(x); }
template <typename T>
__device__ __forceinline__ float Tanh(T x) {
  // Without a branch on Hopper. Ampere's dbias kernel has no registers for that.
  if constexpr (kDType == DType::kF32 || kTiling.family != Family::kHopper) return tanhf(x);
  return fabsf(x) < kSmall ? SmallTanh(x * (2 / kSmall)) : AnyTanh(x * (2 / kSmall));
}
__device__ __forceinline__ float Erf(float x) { return erff(x); }
__device__ __forceinline__ float Erfc(float x) { return erfcf(x); }
__device__ __forceinline__ float Sin(float x) { return sinf(x); }
__device__ __forceinline__ float Cos(float x) { return cosf(x); }
__device__ __forceinline__ float Sqrt(float x) { return sqrtf(x); }
__device__ __forceinline__ float Floor(float x) { return floorf(x); }
__device__ __forceinline__ float RoundHalfAway(float x) { return roundf(x); }
__device__ __forceinline__ float RoundHalfEven(float x) { return rintf(x); }

template <typename T>
__device__ __forceinline__ float RoundTo(float x) {
  if constexpr (kSameType<T, BF16>) {
    const uint32_t bits = __float_as_uint(x);
    return x == x ? __uint_as_float((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000) : x;
  } else if constexpr (kSameType<T, F16>) {
    const uint32_t bits = __float_as_uint(fabsf(x));
    const float normal = __uint_as_float((bits + 0xFFF + (bits >> 13 & 1)) & 0xFFFFE000);
    const float rounded = fabsf(x) < 0x1p-14f ? (fabsf(x) + 0.5f) - 0.5f : normal > 65504.0f ? Infinity() : normal;
    return x == x ? copysignf(rounded, x) : x;
  }
  return x;
}

__device__ __forceinline__ unsigned Bits(unsigned x) { return x; }
__device__ __forceinline__ int Quotient(int x, int y) { return y == 0 ? -1 : y == -1 ? int(0 - Bits(x)) : x / y; }
__device__ __forceinline__ unsigned Quotient(unsigned x, unsigned y) { return y == 0 ? 0xFFFFFFFF : x / y; }
__device__ __forceinline__ unsigned ShiftLeft(unsigned x, unsigned y) { return y < 32 ? x << y : 0; }
__device__ __forceinline__ int ShiftRight(int x, int y) { return x >> (unsigned(y) < 32 ? y : 31); }
__device__ __forceinline__ unsigned ShiftRight(unsigned x, unsigned y) { return y < 32 ? x >> y : 0; }
__device__ __forceinline__ int CountOnes(unsigned x) { return __popc(x); }
__device__ __forceinline__ int CountLeadingZeros(unsigned x) { return __clz(x); }
__device__ __forceinline__ float ToFloats(int x) { return float(x); }
__device__ __forceinline__ float ToFloats(unsigned x) { return float(x); }
__device__ __forceinline__ int ToSigned(float x) {
  return x >= 0x1p31f ? 0x7FFFFFFF : x < -0x1p31f ? int(0x80000000) : x == x ? int(x) : 0;
}
__device__ __forceinline__ unsigned ToUnsigned(float x) { return x >= 0x1p32f ? 0xFFFFFFFF : x > 0 ? unsigned(x) : 0; }

using Of_f = float;
using Of_i = int;
using Of_u = unsigned;
using Of_b = int;
using Of_n = None;
__device__ __forceinline__ float Result_f(float x) { return x; }
__device__ __forceinline__ int Result_i(int x) { return x; }
__device__ __forceinline__ unsigned Result_u(unsigned x) { return x; }
template <typename T>
__device__ __forceinline__ int Result_b(T x) {
  return Truth(x);
}

#define JAX_FLASH_FUNCTION(name, text, type, of_x, of_y, of_z, value)                                            \
  __device__ __forceinline__ Of_##type name(Of_##of_x x, Of_##of_y y = Of_##of_y(), Of_##of_z z = Of_##of_z()) { \
    return Result_##type(value);                                                                                 \
  }
#pragma nv_diagnostic push
#pragma nv_diag_suppress 186  // comparison of an unsigned integer with 0
JAX_FLASH_OPS(JAX_FLASH_FUNCTION)
#pragma nv_diagnostic pop
#undef JAX_FLASH_FUNCTION

}  // namespace program
}  // namespace jax_flash

#include "this_program.h"

namespace jax_flash {

constexpr bool kScoreSlopes = program::kSlopes;  // does the derivative of score_mod depend on the score?

__device__ __forceinline__ const ProgramParams& Programs(const Params& p) {
  return static_cast<const ProgramParams&>(p);
}

}  // namespace jax_flash
