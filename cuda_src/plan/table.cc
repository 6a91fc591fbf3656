#include "cuda_src/plan/table.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cuda_src/contract.h"

namespace jax_flash {

bool LoadsBias(const Problem& p, int cols) {
  return p.score.bias.present && !BiasByEntry(p) && cols * ElementOf(p.score.bias_dtype).bytes % kBoxBytes == 0;
}

const Rows& Table::Of(DType dtype) const {
  const int bytes = ElementOf(dtype).bytes;
  if (bytes != 2 && bytes != 4) throw std::logic_error("there are tables for elements of 2 and 4 bytes");
  return bytes == 2 ? of_16_bits : of_32_bits;
}

std::vector<TileSizes> Candidates(const Rows& rows, const Target& target, const Problem& p, bool may_divide_blocks) {
  std::vector<TileSizes> candidates;
  const Features of_problem = FeaturesOf(p);
  const auto entries = [](const TileSizes& tile) { return tile.rows * tile.cols; };
  for (const FeatureBits ignored : {FeatureBits(0), kPreferences}) {
    for (const Row& row : rows) {
      const TileSizes& tile = row.tile;
      const Features has = {of_problem.bits | FeaturesOfTiles(p, target, tile.rows).bits};
      const bool fits = (!tile.bias_tiles || LoadsBias(p, tile.cols)) && row.shared <= target.shared &&
                        std::max(p.qk_dim, p.v_dim) <= row.dim && !has.Any(rows.Without(row) & ~ignored) &&
                        (may_divide_blocks || InWholeTiles(p, tile.rows, tile.cols));
      const bool larger = !candidates.empty() && entries(tile) > entries(candidates.back());
      if (fits && !larger && std::find(candidates.begin(), candidates.end(), tile) == candidates.end())
        candidates.push_back(tile);
    }
  }
  return candidates;
}

std::string Obstacle(const Rows& rows, const Target& target, const Problem& p) {
  std::vector<std::string> least;
  TileSizes tile = {};
  for (const Row& row : rows) {
    if (row.shared > target.shared || std::max(p.qk_dim, p.v_dim) > row.dim) continue;
    const Features has = FeaturesOf(p), obstacles = {has.bits & rows.Without(row) & ~kPreferences};
    if (row.tile.bias_tiles && !LoadsBias(p, row.tile.cols)) continue;
    if (obstacles.Any(kHeadDimsUpTo128)) continue;  // as if its head dim did not fit
    std::vector<std::string> names = NamesOf(obstacles);
    if (!InWholeTiles(p, row.tile.rows, row.tile.cols)) names.push_back(NameOfBlocks(p));
    if (least.empty() || names.size() < least.size()) {
      least = names;
      tile = row.tile;
    }
  }
  if (least.empty()) {
    return "it has no tiles for head dims " + std::to_string(p.qk_dim) + " and " + std::to_string(p.v_dim);
  }
  std::string text =
      "its tiles of " + std::to_string(tile.rows) + " x " + std::to_string(tile.cols) + " do not support ";
  for (const std::string& name : least) text += (&name == &least.front() ? "" : " and ") + name;
  return text;
}

}  // namespace jax_flash
