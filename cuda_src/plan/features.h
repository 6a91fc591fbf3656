// Features of a problem that decide its tiles and kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/problem.h"
#include "cuda_src/plan/target.h"
#include "cuda_src/program_source.h"

namespace jax_flash {

// Must the bias be loaded entry by entry? TMA cannot load it if it is broadcast over rows or columns, or if these are
// not aligned to 16 bytes.
bool BiasByEntry(const Problem& p);

// Does a score_mod leave registers for large tiles? It may have a few sums, products, comparisons and loads.
bool IsLight(const Program& score_mod);

// Is a score_mod, or its derivative, too long to be inlined? Then it is called, which would serialize wgmmas.
inline bool ScoreModIsNotInlined(const Problem& p) {
  return std::max(p.score.score_mod.size(), p.score.score_grad.size()) > kMaxInlined;
}

// FEATURE(name, text, there): its name in messages, and whether the problem `p` has it. `has` holds the features above
// it.
//
// Slopes are derivatives of scores that depend on the score: of a score_mod (kScoreSlopes), or of the soft cap.
// Hopper's backward keeps them in 16 bits, and multiplies P or dS by them (hopper/backward_tuning.cuh):
//   kUnkeptSlopes   cannot be kept: there is room for only one kind, and in float16 they may exceed 65504
//   kSlopesAndSums  leave no registers for the sums of captured arrays' gradients above head dim 96
//   kSlopesNotInP   must be multiplied into dS, but above head dim 128 warpgroups exchange only P
#define JAX_FLASH_FEATURES(FEATURE)                                                                                    \
  FEATURE(kCausal, "is_causal", p.mask.is_causal)                                                                      \
  FEATURE(kWindow, "local_window_size or packed sequences", p.mask.local_window_size.present() || p.mask.ranges)       \
  FEATURE(kSegments, "segment ids", p.mask.segment_ids)                                                                \
  FEATURE(kLengths, "query_seq_lengths or key_value_seq_lengths",                                                      \
          (p.mask.query_seq_lengths || p.mask.key_value_seq_lengths) && !p.mask.ranges)                                \
  FEATURE(kQueryOffset, "query_offset", p.mask.query_offset)                                                           \
  FEATURE(kSoftCap, "logits_soft_cap", p.score.logits_soft_cap > 0)                                                    \
  FEATURE(kBias, "bias", p.score.bias.present)                                                                         \
  FEATURE(kF32Bias, "a float32 bias", p.score.bias_dtype == DType::kF32)                                               \
  FEATURE(kBroadcastBias, "a bias that is broadcast over rows or columns",                                             \
          p.score.bias.present && !(p.score.bias.rows && p.score.bias.columns))                                        \
  FEATURE(kMaskMod, "mask_mod", p.mask.mask_mod.present())                                                             \
  FEATURE(kScoreMod, "score_mod", p.score.score_mod.present())                                                         \
  FEATURE(kHeavyMod, "a score_mod of many operations, or one with query_offset, dropout or logits_soft_cap",           \
          has.Any(kScoreMod) &&                                                                                        \
              (!IsLight(p.score.score_mod) || p.mask.query_offset || p.dropout() || p.score.logits_soft_cap > 0))      \
  FEATURE(kScoreSlopes, "a score_mod whose derivative depends on the score", p.score.score_grad.ResultOfScore())       \
  FEATURE(kUnkeptSlopes, "logits_soft_cap or float16 with a score_mod whose derivative depends on the score",          \
          has.Any(kScoreSlopes) && (has.Any(kSoftCap) || p.dtype == DType::kF16))                                      \
  FEATURE(kGradientsOfScore, "gradients of captured arrays that depend on the score",                                  \
          p.score.score_grad.GradientsOfScore())                                                                       \
  FEATURE(kDropout, "dropout", p.dropout())                                                                            \
  FEATURE(kFullPrecision, "full float32 precision", /* f32 as three products of TF32 */                                \
          p.dtype == DType::kF32 && p.full_precision)                                                                  \
  FEATURE(kManyKeys, "more than 1024 keys", p.kv_len > 1024)                                                           \
  FEATURE(kListed, "mask or block_mask", p.mask.block_mask.present || p.mask.array.present)                            \
  FEATURE(kLongCausal, "is_causal alone, with more than 4096 keys",                                                    \
          has.Any(kCausal) && p.kv_len > 4096 && !has.Any(kLocal | kLengths | kQueryOffset | kListed | kSoftCap))      \
  FEATURE(kMaskCapDropout, "two of these together: mask or block_mask, logits_soft_cap, dropout",                      \
          has.Any(kListed) + has.Any(kSoftCap) + has.Any(kDropout) > 1)                                                \
  FEATURE(kSlopesAndSums,                                                                                              \
          "head dims above 96 with gradients of captured arrays and a score_mod whose derivative depends on the "      \
          "score",                                                                                                     \
          p.captured_gradients() && has.Any(kScoreSlopes) && std::max(p.qk_dim, p.v_dim) > 96)                         \
  FEATURE(                                                                                                             \
      kSlopesNotInP,                                                                                                   \
      "gradients of captured arrays with logits_soft_cap or a score_mod whose derivative depends on the score, or "    \
      "dropout with such a score_mod",                                                                                 \
      (p.captured_gradients() && has.Any(kScoreSlopes | kSoftCap)) || (has.Any(kScoreSlopes) && has.Any(kDropout)))    \
  FEATURE(kUnpairedBlocks, "blocks of keys whose size is not a multiple of 128", p.mask.kv_block % kBackwardKeys != 0) \
  FEATURE(kSmallCap, "logits_soft_cap below 0.01", p.score.logits_soft_cap > 0 && p.score.logits_soft_cap < 0.01)      \
  FEATURE(kHeadDimsUpTo128, "head dims up to 128", std::max(p.qk_dim, p.v_dim) <= 128)                                 \
  FEATURE(kValueDimAbove512, "a value head dim above 512", p.v_dim > 512)                                              \
  FEATURE(kUnrounded, "a differentiated scale", p.output_dtype() != p.dtype)

// Features of the problem in tiles of `rows` queries, on `target`.
#define JAX_FLASH_TILE_FEATURES(FEATURE)                                          \
  FEATURE(kFewTiles, "fewer tiles than multiprocessors",                          \
          target.multiprocessors > p.batch * p.q_heads * DivideUp(p.q_len, rows)) \
  FEATURE(kManyRows, "many rows", rows < p.q_len * p.group()) /* of all heads of a group */

#define JAX_FLASH_INDEX(name, text, there) name##Index,
enum FeatureIndex { JAX_FLASH_FEATURES(JAX_FLASH_INDEX) JAX_FLASH_TILE_FEATURES(JAX_FLASH_INDEX) };
#undef JAX_FLASH_INDEX

// A set of features.
using FeatureBits = uint64_t;
#define JAX_FLASH_BIT(name, text, there) name = FeatureBits(1) << name##Index,
enum Feature : FeatureBits { JAX_FLASH_FEATURES(JAX_FLASH_BIT) JAX_FLASH_TILE_FEATURES(JAX_FLASH_BIT) };
#undef JAX_FLASH_BIT

// With these features, a row of tiles works, but others are faster. It is used if no other row fits.
constexpr FeatureBits kPreferences = kManyKeys | kLongCausal | kFewTiles | kManyRows;

constexpr FeatureBits kLocal = kWindow | kSegments;                   // also packed sequences, see kWindow
constexpr FeatureBits kAddsToScores = kBias | kScoreMod;              // entry by entry, except tiles of a bias
constexpr FeatureBits kScoreFeatures = kBias | kSoftCap | kScoreMod;  // scores are formed entry by entry
constexpr FeatureBits kPositionMasks = kCausal | kLocal | kLengths;   // masks without an array of all entries
constexpr FeatureBits kPositions = kPositionMasks | kQueryOffset;

struct Features {
  FeatureBits bits = 0;

  bool Any(FeatureBits set) const { return bits & set; }
  int Count(FeatureBits set) const { return __builtin_popcountll(bits & set); }
};

// The features of a problem, and its features in tiles of this number of queries on this GPU.
Features FeaturesOf(const Problem& problem);
Features FeaturesOfTiles(const Problem& problem, const Target& target, int rows);

// Do the blocks of a block mask consist of whole tiles, which Hopper's kernels need? True without a block mask.
// NameOfBlocks describes the blocks in messages.
inline bool InWholeTiles(const Problem& p, int rows, int cols) {
  return p.mask.q_block % rows == 0 && p.mask.kv_block % cols == 0;
}
inline std::string NameOfBlocks(const Problem& p) {
  return "blocks of " + std::to_string(p.mask.q_block) + " x " + std::to_string(p.mask.kv_block);
}

// The names of the features in messages, in the order of the list above.
std::vector<std::string> NamesOf(Features features);

}  // namespace jax_flash
