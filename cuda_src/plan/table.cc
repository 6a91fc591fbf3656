#include "cuda_src/plan/table.h"

#include <algorithm>
#include <utility>

#include "cuda_src/plan/family.h"

namespace jax_flash {
namespace {

// `tile`: the one that would be used.
unsigned FeaturesOf(const Target& target, const Problem& p, const Tile& tile) {
  const bool bias = p.bias.present, mask = p.mask.present;
  const auto feature = [](bool there, Feature x) { return there ? unsigned(x) : 0; };
  const bool local = p.window() || p.segments;
  return feature(p.causal, kCausal) | feature(p.window(), kWindow) | feature(p.segments, kSegments) |
         feature(p.soft_cap > 0, kSoftCap) | feature(bias, kBias) | feature(mask, kMask) |
         feature(bias && mask, kBiasAndMask) | feature(p.dropout(), kDropout) |
         feature(p.full_precision, kFullPrecision) | feature(p.kv_len > 1024, kManyKeys) |
         feature(p.block_mask.present, kBlockMask) |
         feature(p.block_mask.present && (local || mask || p.dropout()), kCrowdedBlocks) |
         feature(local + mask + p.dropout() > 1, kSeveral) |
         feature(p.qk_dim != p.v_dim || p.qk_dim % 16 != 0, kUncommon) |
         feature(std::max(p.qk_dim, p.v_dim) <= 128, kNarrow) |
         feature(p.batch * p.q_heads * DivideUp(p.q_len, tile.rows) < target.multiprocessors, kFewTiles) |
         feature(p.q_len * p.group() > tile.rows, kManyRows);
}

constexpr std::pair<Feature, const char*> kNames[] = {
    {kCausal, "a causal mask"},
    {kWindow, "a window"},
    {kSegments, "segments"},
    {kSoftCap, "a soft cap"},
    {kBias, "a bias"},
    {kMask, "a mask"},
    {kBiasAndMask, "a bias beside a mask"},
    {kDropout, "dropout"},
    {kFullPrecision, "full precision"},
    {kManyKeys, "more than 1024 keys"},
    {kFewTiles, "fewer tiles than multiprocessors"},
    {kBlockMask, "a block mask"},
    {kManyRows, "many rows"},
    {kCrowdedBlocks, "a block mask beside a window, segments, a mask or dropout"},
    {kSeveral, "two of: a window or segments, a mask, dropout"},
    {kUncommon, "uncommon head dims"},
};

}  // namespace

const Rows& Table::Of(DType dtype) const {
  const int bytes = ElementOf(dtype).bytes;
  if (bytes != 2 && bytes != 4) throw std::logic_error("there are tables for elements of 2 and 4 bytes");
  return bytes == 2 ? of_two : of_four;
}

bool Fits(const Row& row, const Target& target, const Problem& p) {
  return row.shared <= target.shared && std::max(p.qk_dim, p.v_dim) <= row.dim &&
         (row.without & FeaturesOf(target, p, row.tile)) == 0;
}

bool InWholeTiles(const Tile& tile, const Problem& p) {
  return !p.block_mask.present || (p.q_block % tile.rows == 0 && p.kv_block % tile.cols == 0);
}

std::string Obstacle(const Rows& rows, const Target& target, const Problem& p) {
  std::string least;
  int least_count = 0;
  for (const Row& row : rows) {
    if (row.shared > target.shared || std::max(p.qk_dim, p.v_dim) > row.dim) continue;
    const unsigned features = row.without & FeaturesOf(target, p, row.tile);
    if (features & kNarrow) continue;  // as if its head dim did not fit
    std::string text;
    int count = 0;
    const auto add = [&](const std::string& what) { text += (count++ == 0 ? "" : " and ") + what; };
    for (const auto& [feature, name] : kNames) {
      if (features & feature) add(name);
    }
    if (!InWholeTiles(row.tile, p)) {
      add("blocks of " + std::to_string(p.q_block) + " x " + std::to_string(p.kv_block));
    }
    if (least.empty() || count < least_count) {
      least_count = count;
      least = "its tiles of " + std::to_string(row.tile.rows) + " x " + std::to_string(row.tile.cols) + " do not do " +
              text;
    }
  }
  if (!least.empty()) return least;
  return "it has no tiles for head dims " + std::to_string(p.qk_dim) + " and " + std::to_string(p.v_dim);
}

}  // namespace jax_flash
