// From x = q_i k_j to the score s_ij: scale, soft cap and bias; what segment ids and the mask operand hide; and what
// dropout leaves.
#pragma once

#include "config.cuh"
#include "ptx/types.cuh"

namespace jax_flash {

// O and l are rescaled only when the maximum has grown by more than 2^8 since: P stays below 256, well within f32 and
// f16.
constexpr float kRescaleAt = 8.0f;

__device__ __forceinline__ float Tanh(float x) {
  if (kDType == DType::kF32) return tanhf(x);
  return 1.0f - 2.0f * Reciprocal(1.0f + Exp2(x * (2 * kLog2e)));  // absolute error 1e-7
}

// The offset of row i, column j. (Both strides fit in 32 bits, and one multiplication then does for each.)
template <typename T>
__device__ __forceinline__ int64_t Offset(const Broadcast<T>& x, int i, int j) {
  return int64_t(i) * int(x.row) + int64_t(j) * int(x.column);
}

// The operands that are looked at entry by entry, for one batch entry and head. Rows and columns are within T and S.
struct Entries {
  const Params& p;
  const int32_t *q_segments, *kv_segments;
  const uint8_t* mask;
  int64_t bias;  // the offset of row 0, column 0

  __device__ __forceinline__ Entries(const Params& p, int batch, int head)
      : p(p),
        q_segments(kSegments ? p.q_segments + int64_t(batch) * p.q_len : nullptr),
        kv_segments(kSegments ? p.kv_segments + int64_t(batch) * p.kv_len : nullptr),
        mask(kMask ? p.mask.data + batch * p.mask.batch + head * p.mask.head : nullptr),
        bias(kBias ? batch * p.bias.batch + head * p.bias.head : 0) {}

  // Whether entry (i, j) is hidden by what is not a matter of positions; of the head `next` after this one.
  __device__ __forceinline__ bool Hidden(int i, int j, int next = 0) const {
    return (kSegments && q_segments[i] != kv_segments[j]) ||
           (kMask && mask[next * p.mask.head + Offset(p.mask, i, j)] == 0);
  }

  __device__ __forceinline__ float Bias(int i, int j, int next = 0) const {
    return Load<kBiasDType>(p.bias.data, bias + next * p.bias.head + Offset(p.bias, i, j));
  }
};

// τ, which is an operand so that a new value is no new program.
__device__ __forceinline__ float ScaleOf(const Params& p) { return __ldg(p.scale); }

// The factor of the entries of P that dropout keeps.
__device__ __forceinline__ float KeptScale(const Params& p) { return kDropout ? p.keep_scale : 1.0f; }

// Whether dropout drops the entry that has the e-th half of a random word; what is below that half cannot matter.
__device__ __forceinline__ bool Dropped(const Params& p, uint32_t word, int e) {
  return fabsf(__uint_as_float(e == 0 ? word << 16 : word)) < __uint_as_float(p.drop_threshold << 16);
}

// c = cap tanh(scale x / cap)
__device__ __forceinline__ float Cap(const Params& p, float x) {
  return kSoftCap ? p.soft_cap * Tanh(x * (ScaleOf(p) / p.soft_cap)) : x * ScaleOf(p);
}

// -L log2(e) of a row, L = m + log l; or -log2 l, with m apart. -inf where a row has no key: then P = 0.
__device__ __forceinline__ float MinusL(float m, float l) {
  return l == 0.0f ? -Infinity() : kMaximumApart ? -log2f(l) : -fmaf(m, kLog2e, log2f(l));
}

// dc / d(scale x), from c
__device__ __forceinline__ float CapDerivative(const Params& p, float c) {
  return 1.0f - (c / p.soft_cap) * (c / p.soft_cap);
}

}  // namespace jax_flash
