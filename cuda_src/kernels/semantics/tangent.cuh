// What has a tangent, and the tangents of a row's results.
#pragma once

#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash {

constexpr bool kQueryMoves = kProblem.query_tangent, kKeyMoves = kProblem.key_tangent;
constexpr bool kValueMoves = kProblem.value_tangent, kSinksMove = kProblem.sinks_tangent;
constexpr bool kBiasMoves = kProblem.bias_tangent;
constexpr bool kScoresMove = kQueryMoves || kKeyMoves || kBiasMoves || kScoreTangent;

// The tangents of the row `at` of [batch, head, row], from mu = Σ P (Ṡ - r) over its keys.
struct TangentOfRow {
  float mu;  // the same with the sink: Ȯ = A - mu O
  float l;   // the tangent of l
  bool live;

  __device__ __forceinline__ TangentOfRow(const TangentParams& p, int batch, int head, int64_t at, float sum,
                                          float reference)
      : mu(sum) {
    float m = p.m[at], l_with_sink = p.l[at];
    l = p.l[at];
    live = l != 0.0f;
    if (!live) return;
    const Sink sink = JoinSink(p, batch, head, &m, &l_with_sink);
    // The logsumexp has no sink, so the sum over the keys is divided by their share of P.
    const float share = kSinks ? sink.alpha * l / l_with_sink : 1.0f;
    l *= (share > 0.0f ? sum / share : 0.0f) + reference;
    if (kSinks) {
      const auto& moved = p.sinks_tangent;
      const float dz = kSinksMove ? __ldg(moved.data + batch * moved.batch + head * moved.head) : 0.0f;
      mu += sink.p * (dz - reference);
    }
  }

  // An element of Ȯ, from those of A and O.
  __device__ __forceinline__ float Of(const Params& p, float a, float o) const {
    return live ? fmaf(a, ZScale(p), -mu * o) : 0.0f;
  }
};

}  // namespace jax_flash
