// Causal masks, windows and segments with 256 rows in a tile: each warpgroup visits only the kv tiles that its own 64
// rows see, clearly fewer than the kv tiles that any row of the tile sees. The producer loads all of the latter, and a
// warpgroup releases the others unread (Warpgroup::SkipTiles). Then warpgroups are at different kv tiles, so they do
// not take turns. Four warpgroups overlap well without turns.
#pragma once

#include "hopper/forward_shape.cuh"
#include "hopper/row_tiles.cuh"

namespace jax_flash::hopper::forward {

constexpr bool kWarpgroupRanges = (kCausal || kLocal) && !kListed && kRowGroups == 4;

// The number of kv tiles that a warpgroup skips: on the right, before its first tile, and on the left, after its last
// tile.
struct SkippedTiles {
  int before, after;
};

// The tile for one warpgroup: the rows of the whole tile, and the kv tiles that the warpgroup's own rows see. They are
// clamped to the loaded tiles, because the user's ranges may be inconsistent.
__device__ __forceinline__ QTile TileOfWarpgroup(const Params& p, const QTile& tile, int row_group,
                                                 SkippedTiles* skipped) {
  QTile own_tile = tile;
  const int row = tile.row + 64 * row_group;
  const Visible& all = tile.visible;
  Visible& own = own_tile.visible = TilesOf(p, tile.batch, row, row + 64);
  own.any_lo = max(own.any_lo, all.any_lo), own.any_hi = min(own.any_hi, all.any_hi);
  if (own.any_lo >= own.any_hi) own.any_lo = own.any_hi = all.any_lo;
  *skipped = {all.any_hi - own.any_hi, own.any_lo - all.any_lo};
  return own_tile;
}

}  // namespace jax_flash::hopper::forward
