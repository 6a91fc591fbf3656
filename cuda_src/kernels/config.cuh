// The compile-time constants of a kernel. The constants of masks, scores, dropout and programs are in semantics/. Each
// kernel defines its own tile sizes.
#pragma once

#include "cuda_src/contract.h"
#include "this_kernel.h"

namespace jax_flash {

constexpr DType kDType = kProblem.dtype;
constexpr int kQKDim = kProblem.qk_dim;
constexpr int kVDim = kProblem.v_dim;
constexpr bool kWideHeads = IsWide(kQKDim) || IsWide(kVDim);

constexpr bool kFullPrecision = kProblem.full_precision;  // of f32: three TF32 products instead of one
constexpr bool kTF32 = kDType == DType::kF32 && !kFullPrecision;

// Split-KV forward: each CTA computes a part of the keys. The kPacked query heads that share a key/value head are rows
// of one tile. Row r of the tile is query r / kPacked of the group's head r % kPacked.
constexpr bool kParts = kTiling.packed > 0;
constexpr int kPacked = kParts ? kTiling.packed : 1;
constexpr bool kBalanced = kTiling.balanced;

constexpr int kPage = kProblem.page;  // keys per page; 0 without pages

constexpr bool kSinks = kProblem.sinks;

template <bool kFirst, typename First, typename Second>
struct OneOf {
  using Type = First;
};
template <typename First, typename Second>
struct OneOf<false, First, Second> {
  using Type = Second;
};

// The parameter of kernels that never call score programs, and of kernels that may.
using RowParams = OneOf<kSinks, SinkParams, Params>::Type;
using KernelParams = OneOf<!kSinks && (kProblem.score_mod || kProblem.mask_mod), ProgramParams, RowParams>::Type;

constexpr bool kUnrounded = kProblem.unrounded;  // O and dQ are f32, the other arrays have 16 bits
constexpr int kOutputBytes = kUnrounded ? 4 : BytesOf(kDType);

// Backward only: can rows be empty (l = 0)? An empty row and its dO may contain NaN, which must not reach the
// gradients.
constexpr bool kEmptyRows = kProblem.empty_rows;
constexpr bool kDLogsumexp = kProblem.dlogsumexp;
constexpr bool kDQ = kProblem.dq;
constexpr bool kDK = kProblem.dk;
constexpr bool kDV = kProblem.dv;

}  // namespace jax_flash
