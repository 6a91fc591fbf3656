// What a kernel is compiled for, in the kernels' words. Tile sizes are the kernels' own.
#pragma once

#include "cuda_src/contract.h"
#include "this_kernel.h"

namespace jax_flash {

constexpr DType kDType = kProblem.dtype;
constexpr DType kBiasDType = kProblem.bias_dtype;
constexpr int kQKDim = kProblem.qk_dim;
constexpr int kVDim = kProblem.v_dim;

constexpr bool kCausal = kProblem.causal;
constexpr bool kWindow = kProblem.window;
constexpr bool kQLengths = kProblem.q_lengths;
constexpr bool kKVLengths = kProblem.kv_lengths;
constexpr bool kSegments = kProblem.segments;
constexpr bool kQueryOffset = kProblem.query_offset;
constexpr bool kMask = kProblem.mask;
constexpr bool kBlockMask = kProblem.q_block > 0;
constexpr int kQBlock = kBlockMask ? kProblem.q_block : 16;
constexpr int kKVBlock = kBlockMask ? kProblem.kv_block : 16;
constexpr bool kBias = kBiasDType != DType::kNone;
constexpr bool kSoftCap = kProblem.soft_cap;
constexpr bool kDropout = kProblem.dropout;
constexpr bool kFullPrecision = kProblem.full_precision;  // of f32
constexpr bool kTF32 = kDType == DType::kF32 && !kFullPrecision;

// The forward over parts of the keys. The kPacked query heads that share a key/value head are then rows of one tile:
// row r of it is query r / kPacked, of head r % kPacked of them.
constexpr bool kParts = kTiling.packed > 0;
constexpr int kPacked = kParts ? kTiling.packed : 1;

// The backward only.
constexpr bool kDLogsumexp = kProblem.dlogsumexp;
constexpr bool kDQ = kProblem.dq;
constexpr bool kDK = kProblem.dk;
constexpr bool kDV = kProblem.dv;

// Scores are formed entry by entry, s = cap(scale x) + bias. Otherwise the scale, which is positive, goes into the
// exponent; that is not what full precision asks for.
constexpr bool kScores = kBias || kSoftCap || kFullPrecision;

// Exponentials are of s - m, a difference that is exact where it matters: a bias can be so large that log l is lost in
// L = m + log l, and the rounding of L is more than full precision allows.
constexpr bool kMaximumApart = kBias || kFullPrecision;

}  // namespace jax_flash
