// Units of work of the passes that keep tiles of Q: a few tiles of Q that share each tile of K and V.
#pragma once

#include "common/arrays.h"
#include "common/problem.h"
#include "cpu_src/block.h"
#include "cpu_src/scores.h"
#include "cpu_src/tile.h"

namespace jax_flash::JAX_FLASH_ISA {

// The target number of query rows of a unit: enough to amortize the preparation of tiles of K and V.
constexpr int64_t kUnitRows = 288;
constexpr int64_t kUnitTiles = 8;  // the maximum number of tiles of a unit

// Rows i0 <= i < i0 + rows of query head n. With merged heads, n is the first of them, and row i is query i / merged of
// head n + i % merged.
struct RowTile {
  int64_t n, i0, rows;
};

// The number of heads whose rows share tiles: all heads of a group if each has few rows, as in decoding, and if no
// operand but the query has values for rows or heads, such as a mask, segment ids or dropout. Otherwise 1.
inline int64_t MergedHeads(const Problem& p) {
  return !HasScoreOperandOfRows(p) && p.kv_heads > 0 && 2 * p.q_len <= kTileRows ? p.group() : 1;
}

// Calls use(r, count, rows) for parts of a tile whose rows have a constant distance in an array [B, T, N, dim]. Its
// rows from r on are `rows`.
template <typename Use>
void ForEachPart(const Problem& p, const RowTile& at, int64_t merged, const void* array, DType dtype, int64_t b,
                 int64_t dim, Use use) {
  const auto from = [&](int64_t n, int64_t i) { return HeadRows(array, dtype, b, i, p.q_len, n, p.q_heads, dim); };
  if (merged == 1) return use(0, at.rows, from(at.n, at.i0));
  for (int64_t r = 0; r < at.rows;) {
    const int64_t row = at.i0 + r, head = row % merged, count = Min(merged - head, at.rows - r);
    Rows rows = from(at.n + head, row / merged);
    rows.stride = dim;
    use(r, count, rows);
    r += count;
  }
}

// The q tiles of all heads that share K and V, divided into units. Tiles with the same rows are adjacent.
struct Units {
  const Problem& p;
  const int64_t heads;  // the number of heads of a group that have tiles of their own
  const Tiling row_tiles;
  const int64_t tiles, tile_rows, unit_tiles, units;

  Units(const Problem& p, int64_t threads, int64_t merged = 1)
      : p(p),
        heads(p.group() / merged),
        row_tiles(merged == 1 ? RowTiles(p) : MergedRowTiles(p, merged, threads)),
        tiles(row_tiles.count() * heads),
        tile_rows(Min(row_tiles.tile, row_tiles.size)),
        // Fewer tiles for each unit if there would not be enough units for all threads.
        unit_tiles(tile_rows == 0 ? 1
                                  : Max(1, Min(Min(kUnitRows / tile_rows, kUnitTiles),
                                               p.batch * p.kv_heads * tiles / (4 * threads)))),
        units(RoundUp(tiles, unit_tiles) / unit_tiles) {}

  // Smaller tiles if there would not be one for each thread.
  static Tiling MergedRowTiles(const Problem& p, int64_t merged, int64_t threads) {
    const int64_t rows = p.q_len * merged, all = p.batch * p.kv_heads * rows;
    const int64_t tile = Min(kTileRows, RoundUp(Max(all / threads, 1), kBlockRows));
    return {rows, RoundUp(Max(rows, 1), tile), tile};
  }

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
    const int64_t tile = unit.first + t;
    const Tiling::Range rows = row_tiles[tile / heads];
    return {unit.head * p.group() + tile % heads, rows.begin, rows.size};
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
