// From x = q_i k_j to the score s_ij: scale, soft cap and bias.
#pragma once

#include "config.cuh"
#include "ptx/compiler.cuh"
#include "ptx/types.cuh"
#include "semantics/mask.cuh"
#include "semantics/program.cuh"
#include "semantics/tanh.cuh"

namespace jax_flash {

constexpr DType kBiasDType = kProblem.bias_dtype;
constexpr bool kBias = kBiasDType != DType::kNone;
constexpr bool kSoftCap = kProblem.soft_cap;
constexpr bool kAddsToScores = kBias || kScoreMod;  // can a score be anything, whatever q and k are?

// Are scores formed in full, s = score_mod(unit x + bias)? Otherwise the unit, which is positive, goes into the
// exponent; that is not what full precision asks for.
constexpr bool kWholeScores = kBias || kFullPrecision || kScoreMod;
constexpr bool kFormsScores = kWholeScores || kSoftCap;  // is there anything to be done entry by entry?

// τ. It is an operand, so that a new value does not compile a new program.
__device__ __forceinline__ float ScaleOf(const Params& p) { return __ldg(p.scale); }

// The factor of x, or with a soft cap of what Cap makes of x, in a score to which no bias has been added.
__device__ __forceinline__ float Unit(const Params& p) { return kSoftCap ? p.soft_cap : ScaleOf(p); }

// What S still has to be multiplied by to become scores.
__device__ __forceinline__ float ScoreScale(const Params& p) { return kWholeScores ? 1.0f : Unit(p); }

// Scores are mostly small beside their cap. Bit 30 of y (tanh.cuh) says that |u| is kSmall or more, infinite, or NaN.
constexpr uint32_t kNotSmall = 0x40000000;

// x becomes tanh(u), u = scale x / cap, in all entries that a lane has.
template <int kCount>
__device__ __forceinline__ void Cap(const Params& p, float (&S)[kCount]) {
  if constexpr (!kSoftCap) return;
  const float u_of_x = ScaleOf(p) * p.inverse_soft_cap;
  if constexpr (kDType == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) S[i] = tanhf(S[i] * u_of_x);
    return;
  }
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    S[i] *= u_of_x * (2 / kSmall);
    bits |= __float_as_uint(S[i]);
  }
  if (__any_sync(0xFFFFFFFFu, (bits & kNotSmall) != 0)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) S[i] = kProblem.large_cap ? tanhf(S[i] * (kSmall / 2)) : AnyTanh(S[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i % 16 == 0 && Never()) return;  // keeps ptxas from moving work ahead: wide heads leave no registers for it
      S[i] = SmallTanh(S[i]);
    }
  }
}
template <int kCount, int kChunks>
__device__ __forceinline__ void Cap(const Params& p, float (&S)[kCount][kChunks][4]) {
  Cap(p, reinterpret_cast<float (&)[kCount * kChunks * 4]>(S));
}

// The slope of the soft cap, dc / d(scale x), from t = c / cap.
__device__ __forceinline__ float SlopeOf(float t) { return kSoftCap ? 1.0f - t * t : 1.0f; }

// The same from P = exp(c - L) and L / cap, where there is no bias. Where P is 0 its slope does not matter.
__device__ __forceinline__ float SlopeOfP(const Params& p, float P, float L) {
  return SlopeOf(fmaxf(fmaf(Log2(fabsf(P)), p.inverse_soft_cap / kLog2e, L), -1.0f));
}

// What score_mod is given where the bias is -inf. Such a bias masks, whatever score_mod makes of -inf, so Mod looks for
// this NaN. Arithmetic never returns it: NaNs that a GPU computes have no sign.
__device__ __forceinline__ constexpr uint32_t MaskedByBias() { return 0xFFC0B1A5; }

// A score c with its bias.
__device__ __forceinline__ float WithBias(float c, float bias) {
  return kScoreMod && bias == -Infinity() ? __uint_as_float(MaskedByBias()) : c + bias;
}

// s_ij of one batch entry and head.
struct Score {
  const Params& p;
  int batch, head;
  int64_t bias;  // the offset of row 0, column 0

  __device__ __forceinline__ Score(const Params& p, int batch, int head)
      : p(p), batch(batch), head(head), bias(kBias ? batch * p.bias.batch + head * p.bias.head : 0) {}

  // The score of x, or of what Cap has made of it, where scores are formed in full. Where (i, j) is not within T and S
  // it is some number, which will be hidden.
  __device__ __forceinline__ float Of(float x, int i, int j) const { return Mod(BeforeMod(x, i, j), i, j); }
  __device__ __forceinline__ float BeforeMod(float x, int i, int j) const {
    const float c = x * Unit(p);
    return kBias ? WithBias(c, Bias(min(i, p.q_len - 1), min(j, p.kv_len - 1))) : c;
  }

  // The bias at (i, j), which is within T and S, of the head that is `next` heads after this one.
  __device__ __forceinline__ float Bias(int i, int j, int next = 0) const {
    return Load<kBiasDType>(p.bias.data, bias + next * p.bias.head + Offset(p.bias, i, j));
  }

  // What score_mod returns for s, for the head that is `next` heads after this one; and the cotangent of s from that of
  // what it returns.
  __device__ __forceinline__ float Mod(float s, int i, int j, int next = 0) const {
    if constexpr (!kScoreMod) return s;
    return Masked(s, program::ScoreMod<false>(Programs(p), PlaceOf(p, batch, head + next, i, j), s));
  }
  // kAccumulates: also adds to the gradients of captured arrays.
  template <bool kAccumulates>
  __device__ __forceinline__ float Unmod(float s, float ds, int i, int j) const {
    if (!kScoreGrad) return ds;
    return UnmodAt<kAccumulates>(s, ds, PlaceOf(p, batch, head, i, j));
  }

  // The same for entry x of line h. kWithin: it is known to be within T and S.
  template <bool kWithin, bool kTransposed>
  __device__ __forceinline__ float Mod(float s, const View<kTransposed>& view, int h, int x) const {
    if constexpr (!kScoreMod) return s;
    return Masked(s, program::ScoreMod<kWithin>(Programs(p), PlaceOf(p, batch, head, view, h, x), s));
  }
  template <bool kTransposed>
  __device__ __forceinline__ float Unmod(float s, float ds, const View<kTransposed>& view, int h, int x) const {
    if (!kScoreGrad) return ds;
    return UnmodAt<false>(s, ds, PlaceOf(p, batch, head, view, h, x));
  }
  // The derivative of what score_mod returns, with respect to s.
  template <bool kTransposed>
  __device__ __forceinline__ float Slope(float s, const View<kTransposed>& view, int h, int x) const {
    return Unmod(s, 1.0f, view, h, x);
  }

 private:
  // What score_mod made of s, or -inf where the bias masks.
  __device__ __forceinline__ static float Masked(float s, float made) {
    return kBias && __float_as_uint(s) == MaskedByBias() ? -Infinity() : made;
  }

  template <bool kAccumulates>
  __device__ __forceinline__ float UnmodAt(float s, float ds, const program::Place& at) const {
    const float before = program::ScoreGrad<false>(Programs(p), at, s, ds, program::AddEach<kAccumulates>());
    return ds == 0.0f ? ds : before;
  }
};

// dc / d(scale x) of two entries, from their c / cap.
__device__ __forceinline__ uint32_t PackSlopes(float t, float next) { return Pack(SlopeOf(t), SlopeOf(next)); }

// Multiplies two entries by their slopes. What is hidden stays 0, even if a score_mod's slope is NaN there.
__device__ __forceinline__ void TimesSlopes(uint32_t slopes, float* x, float* next) {
  if (!kSoftCap && !kScoreSlopes) return;
  const float2 slope = Unpack(slopes);
  if (!kScoreSlopes || *x != 0.0f) *x *= slope.x;
  if (!kScoreSlopes || *next != 0.0f) *next *= slope.y;
}

}  // namespace jax_flash
