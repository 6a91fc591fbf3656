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
constexpr bool kSoftCap = kProblem.soft_cap != SoftCap::kNone;
constexpr bool kAddsToScores = kBias || kScoreMod;  // can scores have any value, whatever Q and K are?

// Are scores formed in full, as s = score_mod(factor x + bias)? Otherwise the positive factor (CapOrScale) is applied
// in the exponent, which is less accurate than full precision requires.
constexpr bool kWholeScores = kAddsToScores || kFullPrecision;
constexpr bool kFormsScores = kWholeScores || kSoftCap;  // does any feature change single entries of S?

// The scale tau. It is an operand, because a new value must not compile a new program.
__device__ __forceinline__ float ScaleOf(const Params& p) { return __ldg(p.scale); }

// The factor from x, or with a soft cap from tanh(scale x / cap), to a score without bias.
__device__ __forceinline__ float CapOrScale(const Params& p) { return kSoftCap ? p.soft_cap : ScaleOf(p); }

// The remaining factor between S and scores.
__device__ __forceinline__ float ScoreScale(const Params& p) { return kWholeScores ? 1.0f : CapOrScale(p); }

// Most scores are small compared with the cap. Bit 30 of y (tanh.cuh) is set if |u| is at least kSmall, infinite or
// NaN.
constexpr uint32_t kNotSmall = 0x40000000;

// Replaces x by tanh(u), u = scale x / cap, in all entries of a lane. The factor cap follows later (CapOrScale).
// Without a soft cap, it does nothing.
template <int kCount>
__device__ __forceinline__ void SoftCapTanh(const Params& p, float (&S)[kCount]) {
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
    for (int i = 0; i < kCount; ++i)
      S[i] = kProblem.soft_cap == SoftCap::kLarge ? tanhf(S[i] * (kSmall / 2)) : AnyTanh(S[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i % 16 == 0 && OpaqueFalse()) return;  // see OpaqueFalse: at large head dims, code moved ahead would spill
      S[i] = SmallTanh(S[i]);
    }
  }
}
template <int kCount, int kChunks>
__device__ __forceinline__ void SoftCapTanh(const Params& p, float (&S)[kCount][kChunks][4]) {
  SoftCapTanh(p, reinterpret_cast<float (&)[kCount * kChunks * 4]>(S));
}

// The slope of the soft cap, dc / d(scale x), from t = c / cap.
__device__ __forceinline__ float SlopeOf(float t) { return kSoftCap ? 1.0f - t * t : 1.0f; }

// The same from P = exp(c - L) and L / cap, without a bias. The slope does not matter if P is 0.
__device__ __forceinline__ float SlopeOfP(const Params& p, float P, float L) {
  return SlopeOf(fmaxf(fmaf(Log2(fabsf(P)), p.inverse_soft_cap / kLog2e, L), -1.0f));
}

// The argument of score_mod where the bias is -inf. Such a bias masks the entry, whatever score_mod returns for -inf,
// so Masked checks for this NaN. Arithmetic never produces it, because NaNs computed by a GPU have no sign.
__device__ __forceinline__ constexpr uint32_t MaskedByBias() { return 0xFFC0B1A5; }

// The score c with a bias added.
__device__ __forceinline__ float WithBias(float c, float bias) {
  return kScoreMod && bias == -Infinity() ? __uint_as_float(MaskedByBias()) : c + bias;
}

// The scores of one batch entry and head.
struct Score {
  const Params& p;
  int batch, head;
  int64_t bias;  // the offset of row 0, column 0

  __device__ __forceinline__ Score(const Params& p, int batch, int head)
      : p(p), batch(batch), head(head), bias(kBias ? batch * p.bias.batch + head * p.bias.head : 0) {}

  // The score of x, or with a soft cap of the result of SoftCapTanh, where scores are formed in full. Outside T and S
  // the result is arbitrary; positions hide it.
  __device__ __forceinline__ float Of(float x, int i, int j) const { return Mod(BeforeMod(x, i, j), i, j); }
  __device__ __forceinline__ float BeforeMod(float x, int i, int j) const {
    const float c = x * CapOrScale(p);
    return kBias ? WithBias(c, Bias(min(i, p.q_len - 1), min(j, p.kv_len - 1))) : c;
  }

  // The bias at (i, j) within T and S, `next` heads after this one.
  __device__ __forceinline__ float Bias(int i, int j, int next = 0) const {
    return Load<kBiasDType>(p.bias.data, bias + next * p.bias.head + Offset(p.bias, i, j));
  }

  // Mod: score_mod(s), for the head `next` heads after this one. ModCotangent: the cotangent of s, from the cotangent
  // of the result.
  __device__ __forceinline__ float Mod(float s, int i, int j, int next = 0) const {
    if constexpr (!kScoreMod) return s;
    return Masked(s, program::ScoreMod<false>(Programs(p), EntryOf(p, batch, head + next, i, j), s));
  }
  // kAccumulates: also adds to the gradients of captured arrays.
  template <bool kAccumulates>
  __device__ __forceinline__ float ModCotangent(float s, float ds, int i, int j) const {
    if (!kScoreGrad) return ds;
    return ModCotangentAt<kAccumulates>(s, ds, EntryOf(p, batch, head, i, j));
  }

  // The tangent of the bias at (i, j), and the tangent of score_mod's result from the tangent of s.
  __device__ __forceinline__ float BiasTangent(const TangentParams& p, int i, int j) const {
    return Load<kBiasDType>(p.bias_tangent.data, bias + Offset(p.bias, min(i, p.q_len - 1), min(j, p.kv_len - 1)));
  }
  __device__ __forceinline__ float TangentOfMod(float s, float tangent, int i, int j) const {
    if constexpr (!kScoreTangent) return tangent;
    return program::ScoreTangent<false>(Programs(p), EntryOf(p, batch, head, i, j), s, tangent);
  }

  // The same for entry x of line h. kInBounds: the entry is known to be within T and S.
  template <bool kInBounds, bool kTransposed>
  __device__ __forceinline__ float Mod(float s, const View<kTransposed>& view, int h, int x) const {
    if constexpr (!kScoreMod) return s;
    return Masked(s, program::ScoreMod<kInBounds>(Programs(p), EntryOf(p, batch, head, view, h, x), s));
  }
  template <bool kTransposed>
  __device__ __forceinline__ float ModCotangent(float s, float ds, const View<kTransposed>& view, int h, int x) const {
    if (!kScoreGrad) return ds;
    return ModCotangentAt<false>(s, ds, EntryOf(p, batch, head, view, h, x));
  }
  // The derivative of score_mod's result with respect to s.
  template <bool kTransposed>
  __device__ __forceinline__ float Slope(float s, const View<kTransposed>& view, int h, int x) const {
    return ModCotangent(s, 1.0f, view, h, x);
  }

 private:
  // The result of score_mod, or -inf where the bias masks.
  __device__ __forceinline__ static float Masked(float s, float made) {
    return kBias && __float_as_uint(s) == MaskedByBias() ? -Infinity() : made;
  }

  template <bool kAccumulates>
  __device__ __forceinline__ float ModCotangentAt(float s, float ds, const program::Entry& at) const {
    const float before = program::ScoreGrad<false>(Programs(p), at, s, ds, program::AddSeparately<kAccumulates>());
    return ds == 0.0f ? ds : before;
  }
};

// dc / d(scale x) of two entries, from c / cap.
__device__ __forceinline__ uint32_t PackSlopes(float t, float next) { return Pack(SlopeOf(t), SlopeOf(next)); }

// Multiplies two entries by their slopes. Masked entries stay 0, even if score_mod's slope is NaN there.
__device__ __forceinline__ void TimesSlopes(uint32_t slopes, float* x, float* next) {
  if (!kSoftCap && !kScoreSlopes) return;
  const float2 slope = Unpack(slopes);
  if (!kScoreSlopes || *x != 0.0f) *x *= slope.x;
  if (!kScoreSlopes || *next != 0.0f) *next *= slope.y;
}

}  // namespace jax_flash
