// What a problem may have that a choice of tiles, or a way of computing, may leave to others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/problem.h"
#include "cuda_src/plan/target.h"
#include "cuda_src/program_source.h"

namespace jax_flash {

// Whether the entries of a bias can only be looked up one by one: it is broadcast over rows or columns, or these do not
// begin at multiples of 16 bytes.
bool BiasByEntry(const Problem& p);

// Whether a score_mod leaves registers for large tiles: a few sums, products, comparisons and look-ups.
bool IsLight(const Program& score_mod);

// FEATURE(name, text, there): what messages call it, and whether the problem `p` has it; `has` are those above.
#define JAX_FLASH_FEATURES(FEATURE)                                                                                    \
  FEATURE(kCausal, "a causal mask", p.causal)                                                                          \
  FEATURE(kWindow, "a window or packed sequences", p.window() || p.ranges)                                             \
  FEATURE(kSegments, "segments", p.segments)                                                                           \
  FEATURE(kLengths, "lengths", (p.q_lengths || p.kv_lengths) && !p.ranges)                                             \
  FEATURE(kQueryOffset, "a query offset", p.query_offset)                                                              \
  FEATURE(kSoftCap, "a soft cap", p.soft_cap > 0)                                                                      \
  FEATURE(kBias, "a bias", p.bias.present)                                                                             \
  FEATURE(kWideBias, "a float32 bias", p.bias_dtype == DType::kF32)                                                    \
  FEATURE(kBiasByEntry, "a bias that TMA cannot load", BiasByEntry(p))                                                 \
  FEATURE(kBroadcastBias, "a bias that is broadcast over rows or columns",                                             \
          p.bias.present && !(p.bias.rows && p.bias.columns))                                                          \
  FEATURE(kMask, "a mask", p.mask.present) /* in a forward of few queries */                                           \
  FEATURE(kMaskMod, "a mask_mod", p.mask_mod.present())                                                                \
  FEATURE(kScoreMod, "a score_mod", p.score_mod.present())                                                             \
  FEATURE(kLongProgram, "a score_mod, or its derivative, of more than 32 instructions", /* wgmmas would wait */        \
          std::max(p.score_mod.size(), p.score_grad.size()) > kInlined)                                                \
  FEATURE(kHeavyMod, "a score_mod of many operations, or one with a query offset, dropout or a soft cap",              \
          has.Any(kScoreMod) && (!IsLight(p.score_mod) || p.query_offset || p.dropout() || p.soft_cap > 0))            \
  FEATURE(kScoreSlopes, "a score_mod whose derivative depends on the score", p.score_grad.ResultOfScore())             \
  FEATURE(kLargeSlopes, "float16 with a score_mod whose derivative depends on the score",                              \
          p.dtype == DType::kF16 && has.Any(kScoreSlopes)) /* and may exceed 65504 */                                  \
  FEATURE(kCapturedGradients, "gradients of captured arrays", p.captured_gradients())                                  \
  FEATURE(kGradientsOfScore, "gradients of captured arrays that depend on the score", p.score_grad.GradientsOfScore()) \
  FEATURE(kDropout, "dropout", p.dropout())                                                                            \
  FEATURE(kFloat32, "float32", p.dtype == DType::kF32)                                                                 \
  FEATURE(kFullPrecision, "full precision", p.full_precision) /* f32 as three products of TF32 */                      \
  FEATURE(kManyKeys, "more than 1024 keys", p.kv_len > 1024)                                                           \
  FEATURE(kListed, "a mask or a block mask", p.block_mask.present)                                                     \
  FEATURE(kLongCausal, "a causal mask, and no other, of more than 4096 keys",                                          \
          has.Any(kCausal) && p.kv_len > 4096 && !has.Any(kLocal | kLengths | kQueryOffset | kListed | kSoftCap))      \
  FEATURE(kCrowdedBlocks, "a block mask with a window, segments or dropout",                                           \
          has.Any(kListed) && has.Any(kLocal | kDropout))                                                              \
  FEATURE(kTornPairs, "blocks of keys whose size is not a multiple of 128", p.kv_block % kPairedKeys != 0)             \
  FEATURE(kSeveral, "dropout with a window or segments", has.Any(kLocal) && has.Any(kDropout))                         \
  FEATURE(kCapAndSum, "a soft cap with a bias or a score_mod", has.Any(kSoftCap) && has.Any(kAddsToScores))            \
  FEATURE(kCapAndSumInBlocks, "a soft cap with a bias or a score_mod and a block mask with others",                    \
          has.Any(kCapAndSum) && has.Any(kListed) && has.Any(kRanges | kDropout | kMaskMod | kScoreMod))               \
  FEATURE(kCapAndSlopes, "a soft cap with a score_mod whose derivative depends on the score",                          \
          has.Any(kSoftCap) && has.Any(kScoreSlopes))                                                                  \
  FEATURE(kLateSlopes,                                                                                                 \
          "a score_mod whose derivative depends on the score with dropout or gradients of captured arrays",            \
          has.Any(kScoreSlopes) && has.Any(kDropout | kCapturedGradients))                                             \
  FEATURE(kCapAndGradients, "gradients of captured arrays with a soft cap",                                            \
          has.Any(kCapturedGradients) && has.Any(kSoftCap))                                                            \
  FEATURE(kModAndBias, "a score_mod with a bias", has.Any(kScoreMod) && has.Any(kBias))                                \
  FEATURE(kModBiasDropout, "a score_mod with a bias and dropout", has.Any(kModAndBias) && has.Any(kDropout))           \
  FEATURE(kCrowdedMod, "a score_mod with a bias and a block mask or positions",                                        \
          has.Any(kModAndBias) && (IsLight(p.score_mod) ? has.Any(kListed) && has.Any(kLocal)                          \
                                                        : has.Any(kListed | kLocal | kLengths | kQueryOffset)))        \
  FEATURE(kSeveralAndMask, "a mask_mod with dropout and a window or segments", has.Any(kMaskMod) && has.Any(kSeveral)) \
  FEATURE(kCrowdedMask, "a mask_mod with dropout or a bias and a causal mask, a window, segments or lengths",          \
          has.Any(kMaskMod) && has.Any(kDropout | kBias) && has.Any(kRanges))                                          \
  FEATURE(kGradientsInBlocks, "gradients of captured arrays with a mask or a block mask",                              \
          has.Any(kCapturedGradients) && has.Any(kListed))                                                             \
  FEATURE(kCrowdedCap, "a soft cap with dropout and a window or segments", has.Any(kSoftCap) && has.Any(kSeveral))     \
  FEATURE(kSmallCap, "a soft cap below 0.01", p.soft_cap > 0 && p.soft_cap < 0.01)                                     \
  FEATURE(kApartDQ, "a query gradient from a separate kernel", !SumsDQ(p))                                             \
  FEATURE(kUncommon, "uncommon head dims", p.qk_dim != p.v_dim || p.qk_dim % 16 != 0)                                  \
  FEATURE(kHeadDimsUpTo128, "head dims up to 128", std::max(p.qk_dim, p.v_dim) <= 128)

// Likewise of the problem in tiles of `rows` queries, on `target`.
#define JAX_FLASH_TILE_FEATURES(FEATURE)                                          \
  FEATURE(kFewTiles, "fewer tiles than multiprocessors",                          \
          target.multiprocessors > p.batch * p.q_heads * DivideUp(p.q_len, rows)) \
  FEATURE(kManyRows, "many rows", rows < p.q_len * p.group()) /* of a group's heads together */

#define JAX_FLASH_PLACE(name, text, there) name##Place,
enum FeaturePlace { JAX_FLASH_FEATURES(JAX_FLASH_PLACE) JAX_FLASH_TILE_FEATURES(JAX_FLASH_PLACE) };
#undef JAX_FLASH_PLACE

// A set of them has these bits.
using FeatureBits = uint64_t;
#define JAX_FLASH_BIT(name, text, there) name = FeatureBits(1) << name##Place,
enum Feature : FeatureBits { JAX_FLASH_FEATURES(JAX_FLASH_BIT) JAX_FLASH_TILE_FEATURES(JAX_FLASH_BIT) };
#undef JAX_FLASH_BIT

// Features with which a row of tiles works, but is slower than others: if no other row fits, it is taken all the same.
constexpr FeatureBits kPreferences = kManyKeys | kLongCausal | kFewTiles | kManyRows;

constexpr FeatureBits kLocal = kWindow | kSegments;
constexpr FeatureBits kAddsToScores = kBias | kScoreMod;              // entry by entry, but for tiles of a bias
constexpr FeatureBits kScoreFeatures = kBias | kSoftCap | kScoreMod;  // scores are formed entry by entry
constexpr FeatureBits kRanges = kCausal | kLocal | kLengths;          // masks that need no array of all entries
constexpr FeatureBits kPositions = kRanges | kQueryOffset;

struct Features {
  FeatureBits bits = 0;

  bool Any(FeatureBits set) const { return bits & set; }
  int Count(FeatureBits set) const { return __builtin_popcountll(bits & set); }
};

// The features of a problem; and these together with those that it has in tiles of so many queries on this GPU.
Features FeaturesOf(const Problem& problem);
Features FeaturesOf(const Problem& problem, const Target& target, int rows);

// Whether blocks of a block mask, if there is one, are whole tiles, as Hopper's kernels want them; and what messages
// call those that are not.
inline bool InWholeTiles(const Problem& p, int rows, int cols) {
  return p.q_block % rows == 0 && p.kv_block % cols == 0;
}
inline std::string NameOfBlocks(const Problem& p) {
  return "blocks of " + std::to_string(p.q_block) + " x " + std::to_string(p.kv_block);
}

// The names of the features of a set, as messages have them, in the order of the list above.
std::vector<std::string> NamesOf(Features features);

}  // namespace jax_flash
