// The statistics of softmax: m and l of the forward, L of the backward.
#pragma once

#include "ptx/warp.cuh"
#include "semantics/tile_mask.cuh"

namespace jax_flash {

// Are m and l kept separately in the backward, as exp(s - m) / l? A bias or score_mod can be so large that log l is
// lost in L = m + log l. Full precision does not allow the rounding of L either.
constexpr bool kSeparateMaximum = kAddsToScores || kFullPrecision;

// O and l are rescaled only if the exponential of the maximum has grown by more than 2^8. So P stays at most 2^8, well
// within the range of f32 and f16. An unrounded O has more digits: in a row in which one key has most of the weight,
// its P is 1, which is exact.
constexpr float kRescaleAt = kUnrounded ? 0.0f : 8.0f;

// -L log2(e) of a row, where L = m + log l; or -log2 l with kSeparateMaximum. It is -inf for a row without keys, so P =
// 0.
__device__ __forceinline__ float MinusL(float m, float l) {
  return l == 0.0f ? -Infinity() : kSeparateMaximum ? -log2f(l) : -fmaf(m, kLog2e, log2f(l));
}

// The factor between S and exponents of 2.
__device__ __forceinline__ float ToLog2(const Params& p) { return ScoreScale(p) * kLog2e; }

// --- Sinks ---

// z, a logit that joins the denominator of a row's softmax, and has no value.
__device__ __forceinline__ float SinkOf(const Params& p, int batch, int head) {
  const auto& sinks = static_cast<const SinkParams&>(p).sinks;
  return __ldg(sinks.data + batch * sinks.batch + head * sinks.head);
}

// l with the sink. Exponents are relative to `shift`, as in OnlineSoftmax::Shift. If the sum overflows, it is infinite,
// and O is 0.
__device__ __forceinline__ float SumWithSink(const Params& p, int batch, int head, float to_log2, float shift,
                                             float l) {
  if (!kSinks) return l;
  const float z = SinkOf(p, batch, head);
  return l + (kSeparateMaximum ? expf(z - shift) : Exp2(fmaf(z, kLog2e, -shift)));
}

// A row's sink in the backward.
struct Sink {
  float p = 0.0f;      // its probability
  float alpha = 1.0f;  // exp(m without the sink - m with it)
};

// Updates m and l of a row with the sink as one more score. Afterwards P = exp(s - m) / l. Empty rows stay unchanged.
__device__ __forceinline__ Sink JoinSink(const Params& p, int batch, int head, float* m, float* l) {
  if (!kSinks || *l == 0.0f) return {};
  const float z = SinkOf(p, batch, head), larger = fmaxf(*m, z);
  const float alpha = Exp2((*m - larger) * kLog2e), sink = Exp2((z - larger) * kLog2e);
  *m = larger, *l = alpha * *l + sink;
  return {sink / *l, alpha};
}

// MinusL of the row `at` of [batch, head, row], with its sink. With kSeparateMaximum, m stays the maximum of the
// scores.
__device__ __forceinline__ float MinusLOfRow(const Params& p, int batch, int head, int64_t at) {
  float m = p.m[at], l = p.l[at];
  const float of_scores = m;
  JoinSink(p, batch, head, &m, &l);
  const float minus_l = MinusL(m, l);
  return kSinks && kSeparateMaximum && l != 0.0f ? fmaf(of_scores - m, kLog2e, minus_l) : minus_l;
}

// The number of rows of a head in the scratch arrays of Ampere's backward and of Hopper's for wide heads.
__device__ __forceinline__ int PaddedRows(const Params& p) {
  return (p.q_len + kRowPadding - 1) / kRowPadding * kRowPadding;
}

// Is the row `at` of [batch, head, row] empty? Either masks hide all keys from it, or all its scores are -inf.
__device__ __forceinline__ bool IsEmpty(const Params& p, int64_t at) { return kEmptyRows && p.l[at] == 0.0f; }

// D and the sink's gradient, from product = rowsum(dO O) of the row `at` of [batch, head, row].
struct RowGradients {
  static constexpr bool kNeeded = kDLogsumexp || kSinks || kEmptyRows;  // otherwise d is the product

  float d;      // rowsum(dO O) - dlogsumexp; 0 for an empty row
  float dsink;  // the row's contribution to the gradient of its sink

  __device__ __forceinline__ RowGradients(const Params& p, int batch, int head, int64_t at, float product) {
    float m = 0.0f, l = kSinks || kEmptyRows ? p.l[at] : 0.0f, growth = 1.0f;
    const bool empty = kEmptyRows && l == 0.0f;
    if (empty) product = 0.0f;
    if (kSinks) {
      m = p.m[at];
      const float without = l;
      const Sink sink = JoinSink(p, batch, head, &m, &l);
      dsink = -sink.p * product;
      // The logsumexp excludes the sink, so its derivative is P times the ratio of the denominators with and without
      // the sink. If that ratio overflows, all P are 0.
      constexpr float kMinAlpha = 0x1p-115f;
      if (without != 0.0f) growth = l / (without * fmaxf(sink.alpha, kMinAlpha));
    }
    d = kDLogsumexp && !empty ? product - p.dlogsumexp[at] * growth : product;
  }

  __device__ __forceinline__ void StoreOfSink(const Params& p, int64_t at) const {
    if constexpr (kSinks) {
      float* const dsinks = static_cast<const SinkParams&>(p).dsinks;
      if (dsinks != nullptr) dsinks[at] = dsink;
    }
  }
};

// The online softmax of a lane's rows, over tiles of S in sequence: lines 12 and 13 of Algorithm 2. In contrast to the
// paper, O is divided by l at the end, and O and l are rescaled only when necessary.
template <int kLines>
struct OnlineSoftmax {
  float to_log2;               // ToLog2
  float m[kLines], l[kLines];  // l: over this lane's columns only, until Finish
  float reference[kLines];     // the maximum that exponents use: m, or up to 2^8 less

  __device__ __forceinline__ void Start() {
#pragma unroll
    for (int h = 0; h < kLines; ++h) m[h] = reference[h] = -Infinity(), l[h] = 0.0f;
  }

  // m_i = max(m_i, rowmax(S_ij)) of line h. Returns whether O and l must be rescaled.
  template <typename Accumulator>
  __device__ __forceinline__ bool Maximum(Accumulator& S, int h) {
    float maximum = At(S, h, 0);
#pragma unroll
    for (int x = 0; x < EntriesOfLine(S); x += 2) maximum = fmaxf(maximum, fmaxf(At(S, h, x), At(S, h, x + 1)));
    m[h] = fmaxf(m[h], LaneMax<4>(maximum));
    return Grown(h);
  }
  __device__ __forceinline__ bool Grown(int h) const { return (m[h] - reference[h]) * to_log2 > kRescaleAt; }

  // Multiplies l_i by alpha = exp(old m_i - new m_i), and returns alpha, the factor for O.
  __device__ __forceinline__ float Rescale(int h) {
    const float alpha = Exp2((reference[h] - m[h]) * to_log2);
    reference[h] = m[h];
    l[h] *= alpha;
    return alpha;
  }

  // The shift of the exponents.
  __device__ __forceinline__ float Shift(int h) const {
    return reference[h] == -Infinity() ? 0.0f : kSeparateMaximum ? reference[h] : reference[h] * to_log2;
  }

  // P_ij = exp(S_ij - m_i) of line h, and l_i += rowsum(P_ij)
  template <typename Accumulator>
  __device__ __forceinline__ void Exponentials(Accumulator& S, int h, float shift) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int x = 0; x < EntriesOfLine(S); ++x) {
      float& s = At(S, h, x);
      s = Exp2(kSeparateMaximum ? (s - shift) * to_log2 : fmaf(s, to_log2, -shift));
      sum[x % 2] += s;
    }
    l[h] += sum[0] + sum[1];
  }

  // Merges m, l and reference of other keys of the same row. The merged O is alpha times this O plus beta times the
  // other O.
  __device__ __forceinline__ void Merge(int h, float other_m, float other_l, float other, float* alpha, float* beta) {
    const float common = fmaxf(reference[h], other);
    *alpha = reference[h] == -Infinity() ? 0.0f : Exp2((reference[h] - common) * to_log2);
    *beta = other == -Infinity() ? 0.0f : Exp2((other - common) * to_log2);
    reference[h] = common;
    m[h] = fmaxf(m[h], other_m);
    l[h] = l[h] * *alpha + other_l * *beta;
  }

  // After the last tile: sums l over all columns.
  __device__ __forceinline__ void Finish(int h) { l[h] = LaneSum<4>(l[h]); }
  // After Finish: the divisor of O.
  __device__ __forceinline__ float Denominator(const Params& p, int batch, int head, int h) const {
    return SumWithSink(p, batch, head, to_log2, Shift(h), l[h]);
  }
  // l and m of the row, for the backward. A NaN or +inf in a row of S makes l NaN, but not m.
  __device__ __forceinline__ float RowSum(int h) const {
    return l[h] == 0.0f ? 0.0f : l[h] * Exp2((reference[h] - m[h]) * to_log2);
  }
  __device__ __forceinline__ float RowMaximum(const Params& p, int h) const {
    return isnan(l[h]) ? l[h] : m[h] * ScoreScale(p);
  }
};

}  // namespace jax_flash
