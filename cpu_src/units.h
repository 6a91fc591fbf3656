// Units of work of the passes that keep tiles of Q: a few tiles of Q that share each tile of K and V.
#pragma once

#include "common/problem.h"
#include "cpu_src/block.h"
#include "cpu_src/scores.h"
#include "cpu_src/tile.h"

namespace jax_flash::JAX_FLASH_ISA {

// The target number of query rows of a unit: enough to amortize the preparation of tiles of K and V.
constexpr int64_t kUnitRows = 288;
constexpr int64_t kUnitTiles = 8;  // the maximum number of tiles of a unit

// Rows i0 <= i < i0 + rows of query head n.
struct RowTile {
  int64_t n, i0, rows;
};

// The q tiles of all heads that share K and V, divided into units. Tiles with the same rows are adjacent.
struct Units {
  const Problem& p;
  const Tiling row_tiles;
  const int64_t tiles, tile_rows, unit_tiles, units;

  Units(const Problem& p, int64_t threads)
      : p(p),
        row_tiles(RowTiles(p)),
        tiles(row_tiles.count() * p.group()),
        tile_rows(Min(kTileRows, p.q_len)),
        // Fewer tiles for each unit if there would not be enough units for all threads.
        unit_tiles(tile_rows == 0 ? 1
                                  : Max(1, Min(Min(kUnitRows / tile_rows, kUnitTiles),
                                               p.batch * p.kv_heads * tiles / (4 * threads)))),
        units(RoundUp(tiles, unit_tiles) / unit_tiles) {}

  int64_t count() const { return p.batch * p.kv_heads * units; }

  struct Unit {
    int64_t b, head, first, count;
  };

  // The last rows come first, because they have the most work under a causal mask.
  Unit operator[](int64_t index) const {
    const int64_t first = (units - 1 - index % units) * unit_tiles;
    return {index / units / p.kv_heads, index / units % p.kv_heads, first, Min(unit_tiles, tiles - first)};
  }

  RowTile TileOf(const Unit& unit, int64_t t) const {
    const int64_t group = p.group(), tile = unit.first + t;
    const Tiling::Range rows = row_tiles[tile / group];
    return {unit.head * group + tile % group, rows.begin, rows.size};
  }
};

// Visits the kv tiles that the first `count` queries, each with a RowTile, attend to. Calls `load(j0, columns)` once
// for each tile, with the keys within the batch entry's length, and `use(query, block)` for each query.
template <typename A, typename Query, typename Load, typename Use>
void WalkKeys(const Problem& p, const Scores<A>& scores, Query* queries, int64_t count, Load load, Use use) {
  KeyRange keys = {p.kv_len, 0};  // the keys that any row attends to
  for (int64_t t = 0; t < count; ++t) {
    const RowTile& rows = queries[t].at;
    const KeyRange tile_keys = scores.Keys(rows.i0, rows.i0 + rows.rows);
    if (tile_keys.lo < tile_keys.hi) keys = {Min(keys.lo, tile_keys.lo), Max(keys.hi, tile_keys.hi)};
  }
  const Tiling column_tiles = ColumnTiles(p);
  for (int64_t tile = column_tiles.Of(keys.lo); tile < column_tiles.count(); ++tile) {
    const auto [j0, columns] = column_tiles[tile];
    if (j0 >= keys.hi) break;
    bool loaded = false;
    for (int64_t t = 0; t < count; ++t) {
      const RowTile& rows = queries[t].at;
      const Block block = scores.Visible(rows.n, rows.i0, rows.rows, j0, columns);
      if (block.empty()) continue;
      if (!loaded) load(j0, scores.WithinLength(j0, columns));
      loaded = true;
      use(queries[t], block);
    }
  }
}

}  // namespace jax_flash::JAX_FLASH_ISA
