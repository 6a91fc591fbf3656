// What has a tangent, and the tangents of a row's results.
//
// The kernels sum over keys with the weights E = exp(S - m), without the sink and not divided by l. They sum E (Ṡ - r)
// with the terms rounded as in the product with V, for Ȯ. If one key has most of the weight, its rounding error then
// cancels in Ȯ = (A - mu O) / l, because its V is nearly O. If the tangent of l is a result (kLTangent), they also sum
// the terms in f32.
#pragma once

#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash {

constexpr bool kQueryMoves = kProblem.query_tangent, kKeyMoves = kProblem.key_tangent;
constexpr bool kValueMoves = kProblem.value_tangent, kSinksMove = kProblem.sinks_tangent;
constexpr bool kBiasMoves = kProblem.bias_tangent;
constexpr bool kScoresMove = kQueryMoves || kKeyMoves || kBiasMoves || kScoreTangent;
constexpr bool kLTangent = kProblem.l_tangent;

// -m log2(e) of the row `at` of [batch, head, row], or 0 if m is subtracted before (kSeparateMaximum). It is -inf for a
// row without keys, so E = 0.
__device__ __forceinline__ float MinusMOfRow(const Params& p, int64_t at) {
  if (p.l[at] == 0.0f) return -Infinity();
  return kSeparateMaximum ? 0.0f : -p.m[at] * kLog2e;
}

// The tangents of the row `at` of [batch, head, row], from the sums of E (Ṡ - r) over its keys.
struct TangentOfRow {
  float factor;  // from Z E to Z P / keep
  float mu;      // Σ P (Ṡ - r), with the sink as one of the P
  float l;       // the tangent of l, which has no sink
  bool live;

  __device__ __forceinline__ TangentOfRow(const TangentParams& p, int batch, int head, int64_t at, float sum,
                                          float rounded_sum, float reference) {
    float m = p.m[at], l_with_sink = p.l[at];
    live = l_with_sink != 0.0f;
    l = live ? fmaf(l_with_sink, reference, sum) : 0.0f;
    const Sink sink = JoinSink(p, batch, head, &m, &l_with_sink);
    const float to_p = sink.alpha / l_with_sink;  // from E to P
    factor = to_p * ZScale(p);
    mu = to_p * rounded_sum;
    if (kSinks) {
      const auto& moved = p.sinks_tangent;
      const float dz = kSinksMove ? __ldg(moved.data + batch * moved.batch + head * moved.head) : 0.0f;
      mu += sink.p * (dz - reference);
    }
  }

  // An element of Ȯ, from those of A and O.
  __device__ __forceinline__ float Of(float a, float o) const { return live ? fmaf(a, factor, -mu * o) : 0.0f; }
};

}  // namespace jax_flash
