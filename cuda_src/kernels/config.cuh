// What a kernel is compiled for, in the kernels' words. What a feature means, and whether there is one, is in
// semantics/; tile sizes are the kernels' own.
#pragma once

#include "cuda_src/contract.h"
#include "this_kernel.h"

namespace jax_flash {

constexpr DType kDType = kProblem.dtype;
constexpr int kQKDim = kProblem.qk_dim;
constexpr int kVDim = kProblem.v_dim;

constexpr bool kFullPrecision = kProblem.full_precision;  // of f32
constexpr bool kTF32 = kDType == DType::kF32 && !kFullPrecision;

// The forward over parts of the keys. The kPacked query heads that share a key/value head are then rows of one tile:
// row r of it is query r / kPacked, of head r % kPacked of them.
constexpr bool kParts = kTiling.packed > 0;
constexpr int kPacked = kParts ? kTiling.packed : 1;
constexpr bool kBalanced = kTiling.balanced;

constexpr bool kSinks = kProblem.sinks;

constexpr bool kUnrounded = kProblem.unrounded;  // O and dQ are f32, the other arrays have 16 bits
constexpr int kOutputBytes = kUnrounded ? 4 : BytesOf(kDType);

// The backward only.
// Can rows be empty (l = 0)? The content of an empty row and of its dO may be NaN and must not matter.
constexpr bool kEmptyRows = kProblem.empty_rows;
constexpr bool kDLogsumexp = kProblem.dlogsumexp;
constexpr bool kDSinks = kProblem.dsinks;
constexpr bool kDQ = kProblem.dq;
constexpr bool kDK = kProblem.dk;
constexpr bool kDV = kProblem.dv;

}  // namespace jax_flash
