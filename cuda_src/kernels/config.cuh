// What a kernel is compiled for, which the host says in macros. Tile sizes are the kernels' own.
#pragma once

#include "common/dtype.h"

namespace jax_flash {

constexpr DType kDType = DType(JAX_FLASH_DTYPE);
constexpr DType kBiasDType = DType(JAX_FLASH_BIAS_DTYPE);
constexpr int kQKDim = JAX_FLASH_QK_DIM;
constexpr int kVDim = JAX_FLASH_V_DIM;

constexpr bool kCausal = JAX_FLASH_CAUSAL;
constexpr bool kWindow = JAX_FLASH_WINDOW;
constexpr bool kQLengths = JAX_FLASH_Q_LENGTHS;
constexpr bool kKVLengths = JAX_FLASH_KV_LENGTHS;
constexpr bool kSegments = JAX_FLASH_SEGMENTS;
constexpr bool kQueryOffset = JAX_FLASH_QUERY_OFFSET;
constexpr bool kMask = JAX_FLASH_MASK;
constexpr bool kBlockMask = JAX_FLASH_Q_BLOCK > 0;
constexpr int kQBlock = kBlockMask ? JAX_FLASH_Q_BLOCK : 16;
constexpr int kKVBlock = kBlockMask ? JAX_FLASH_KV_BLOCK : 16;
constexpr bool kBias = kBiasDType != DType::kNone;
constexpr bool kSoftCap = JAX_FLASH_SOFT_CAP;
constexpr bool kDropout = JAX_FLASH_DROPOUT;
constexpr bool kFullPrecision = JAX_FLASH_FULL_PRECISION;  // of f32
constexpr bool kTF32 = kDType == DType::kF32 && !kFullPrecision;

// The forward over parts of the keys. The kPacked query heads that share a key/value head are then rows of one tile:
// row r of it is query r / kPacked, of head r % kPacked of them.
constexpr bool kParts = JAX_FLASH_SPLIT > 0;
constexpr int kPacked = kParts ? JAX_FLASH_SPLIT : 1;

// The backward only.
constexpr bool kDLogsumexp = JAX_FLASH_DLOGSUMEXP;
constexpr bool kDQ = JAX_FLASH_DQ;
constexpr bool kDK = JAX_FLASH_DK;
constexpr bool kDV = JAX_FLASH_DV;

// Scores are formed entry by entry, s = cap(scale x) + bias. Otherwise the scale, which is positive, goes into the
// exponent; that is not what full precision asks for.
constexpr bool kScores = kBias || kSoftCap || kFullPrecision;

// Exponentials are of s - m, a difference that is exact where it matters: a bias can be so large that log l is lost in
// L = m + log l, and the rounding of L is more than full precision allows.
constexpr bool kMaximumApart = kBias || kFullPrecision;

}  // namespace jax_flash
