// From x = q_i k_j to the score s_ij: scale, soft cap and bias.
#pragma once

#include "config.cuh"
#include "ptx/types.cuh"
#include "semantics/mask.cuh"
#include "semantics/program.cuh"

namespace jax_flash {

constexpr DType kBiasDType = kProblem.bias_dtype;
constexpr bool kBias = kBiasDType != DType::kNone;
constexpr bool kSoftCap = kProblem.soft_cap;

// Scores are formed entry by entry, s = score_mod(cap(scale x) + bias). Otherwise the scale, which is positive, goes
// into the exponent; that is not what full precision asks for.
constexpr bool kFormsScores = kBias || kSoftCap || kFullPrecision || kScoreMod;

// τ, which is an operand so that a new value is no new program.
__device__ __forceinline__ float ScaleOf(const Params& p) { return __ldg(p.scale); }

// What S has still to be multiplied with to be scores.
__device__ __forceinline__ float ScoreScale(const Params& p) { return kFormsScores ? 1.0f : ScaleOf(p); }

// c = cap tanh(u), u = scale x / cap. For 16-bit elements tanh(u) = 1 - 2 / (1 + exp(2 u)), to an absolute error of
// 1e-7.
__device__ __forceinline__ float Cap(const Params& p, float x) {
  const float u_of_x = kSoftCap ? ScaleOf(p) * p.inverse_soft_cap : 0.0f;
  if constexpr (!kSoftCap) return x * ScaleOf(p);
  if constexpr (kDType == DType::kF32 || kProblem.large_cap) return p.soft_cap * tanhf(x * u_of_x);
  return fmaf(-2.0f * p.soft_cap, Reciprocal(1.0f + Exp2(x * (u_of_x * (2 * kLog2e)))), p.soft_cap);
}

// dc / d(scale x), from c
__device__ __forceinline__ float SlopeOf(const Params& p, float c) {
  return kSoftCap ? 1.0f - (c * p.inverse_soft_cap) * (c * p.inverse_soft_cap) : 1.0f;
}

// The same from P = exp(c - L), where there is no bias. Where P is 0 its slope does not matter.
__device__ __forceinline__ float SlopeOfP(const Params& p, float P, float L) {
  return SlopeOf(p, fmaxf(fmaf(Log2(fabsf(P)), 1 / kLog2e, L), -p.soft_cap));
}

// s_ij of one batch entry and head.
struct Score {
  const Params& p;
  int batch, head;
  int64_t bias;  // the offset of row 0, column 0

  __device__ __forceinline__ Score(const Params& p, int batch, int head)
      : p(p), batch(batch), head(head), bias(kBias ? batch * p.bias.batch + head * p.bias.head : 0) {}

  // From x where scores are formed entry by entry. Where (i, j) is not within T and S it is something that will be
  // hidden.
  __device__ __forceinline__ float Of(float x, int i, int j) const {
    return AddBias(kFormsScores ? Cap(p, x) : x, i, j);
  }
  __device__ __forceinline__ float AddBias(float c, int i, int j) const {
    return kBias ? c + Bias(min(i, p.q_len - 1), min(j, p.kv_len - 1)) : c;
  }

  // dc / d(scale x) of two entries, from their c.
  __device__ __forceinline__ uint32_t PackSlopes(float c, float next) const {
    return kSoftCap ? Pack(SlopeOf(p, c), SlopeOf(p, next)) : 0;
  }

  // (i, j) is within T and S; of the head `next` after this one.
  __device__ __forceinline__ float Bias(int i, int j, int next = 0) const {
    return Load<kBiasDType>(p.bias.data, bias + next * p.bias.head + Offset(p.bias, i, j));
  }

  // What score_mod makes of s, of the head `next` after this one; and the cotangent of s from that of what it makes.
  __device__ __forceinline__ float Mod(float s, int i, int j, int next = 0) const {
    if constexpr (!kScoreMod) return s;
    return program::ScoreMod(Programs(p), PlaceOf(p, batch, head + next, i, j), s);
  }
  // kAccumulates: also adds to the gradients of captured arrays.
  template <bool kAccumulates>
  __device__ __forceinline__ float Unmod(float s, float ds, int i, int j) const {
    if (!kScoreGrad || ds == 0.0f) return ds;
    return program::ScoreGrad<kAccumulates>(Programs(p), PlaceOf(p, batch, head, i, j), s, ds);
  }
};

// Two entries times their slopes.
__device__ __forceinline__ void TimesSlopes(uint32_t slopes, float* x, float* next) {
  if (!kSoftCap) return;
  const float2 slope = Unpack(slopes);
  *x *= slope.x, *next *= slope.y;
}

}  // namespace jax_flash
