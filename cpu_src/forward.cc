// The forward pass: Algorithm 2 of the paper with its two loops exchanged (FlashAttention-2). A tile of Q is kept, so
// O, l and m are written once.
#include "common/problem.h"
#include "cpu_src/dropout_mask.h"
#include "cpu_src/kernels.h"
#include "cpu_src/scores.h"
#include "cpu_src/sink.h"
#include "cpu_src/tile.h"
#include "cpu_src/units.h"

namespace jax_flash::JAX_FLASH_ISA {
namespace {

// A tile of Q and its running results: O, and the maximum and sum of each row. A is the type of all arithmetic: float,
// or double for float64.
template <typename A>
struct QueryTile {
  Tile<A> q, o;
  A* m;
  Tile<A> l;  // a sum for each lane; Finish adds the lanes
  RowTile at;
};

template <typename A>
struct Scratch {
  QueryTile<A> queries[kUnitTiles];
  Tile<A> k, k_transposed, v, s;
  DropoutMask<A> dropout_mask;
  Programs<A> programs;
  int64_t bytes;

  Scratch(const Problem& p, char* memory, int64_t tiles, int64_t tile_rows) {
    Carver carver(memory);
    for (int64_t t = 0; t < tiles; ++t) {
      queries[t].q = carver.NewTile<A>(tile_rows, p.qk_dim);
      queries[t].o = carver.NewTile<A>(tile_rows, p.v_dim);
      queries[t].m = carver.Array<A>(RoundUp(tile_rows, kLanes<A>));
      queries[t].l = carver.NewTile<A>(RoundUp(tile_rows, kLanes<A>), kLanes<A>);
    }
    k = carver.NewTile<A>(kTileColumns, p.qk_dim);
    k_transposed = carver.NewTile<A>(p.qk_dim, kTileColumns);
    v = p.latent ? k : carver.NewTile<A>(kTileColumns, p.v_dim);
    s = carver.NewTile<A>(kTileRows, kTileColumns);
    dropout_mask = DropoutMask<A>(p, &carver);
    programs = Programs<A>(p, &carver);
    bytes = carver.used();
  }
};

// Rows j0 <= j < j0 + columns of K or V, which may be in pages. Invalid page numbers are clamped.
template <typename A>
void LoadKeys(const Problem& p, const Operands& in, const void* array, int64_t b, int64_t head, int64_t dim, int64_t j0,
              int64_t columns, Tile<A> to) {
  if (p.page == 0) {
    LoadRows(HeadRows(array, p.dtype, b, j0, p.kv_len, head, p.kv_heads, dim), columns, dim, A(1), to);
    return;
  }
  for (int64_t c = 0; c < columns;) {
    const int64_t j = j0 + c, in_page = j % p.page, count = Min(p.page - in_page, columns - c);
    const int64_t number = in.page_table[b * p.pages_of_entry() + j / p.page];
    const int64_t page = Max(0, Min(number, p.pages - 1));
    LoadRows(HeadRows(array, p.dtype, page, in_page, p.page, head, p.kv_heads, dim), count, dim, A(1), FromRow(to, c));
    c += count;
  }
}

// max_j S_ij of up to kLanes rows of the computed part of a tile, with one row in each lane.
template <typename A>
Vec<A> RowMaxima(Tile<A> s, const Block& block) {
  constexpr int n = kLanes<A>;
  Vec<A> maxima[n];
  for (int r = 0; r < n; ++r) {
    maxima[r] = Broadcast(-kInfinity<A>);
    if (r >= block.rows) continue;
    for (int64_t c = block.c0; c < block.c1; c += n) maxima[r] = Max(maxima[r], Load(s.row(r) + c));
  }
  Transpose<A>(maxima);
  for (int r = 1; r < n; ++r) maxima[0] = Max(maxima[0], maxima[r]);
  return maxima[0];
}

// m_new = max(m, rowmax(S)), P = exp(S - m_new), l <- e^{m - m_new} l + rowsum(P), O <- e^{m - m_new} O
// for up to kLanes rows. P replaces S.
template <typename A>
void OnlineSoftmax(Tile<A> s, const Block& block, int64_t v_dim, QueryTile<A>& query) {
  const int64_t first = block.i0 - query.at.i0;
  const Vec<A> m = Load(query.m + first), m_new = Max(m, RowMaxima(s, block));
  // In a row without visible keys so far, S - m would be inf - inf.
  const Vec<A> shifts = m_new == -kInfinity<A> ? Vec<A>{} : m_new, rescales = Exp<A>(m - shifts);
  Store(query.m + first, m_new);
  for (int64_t r = 0; r < block.rows; ++r) {
    const A shift = shifts[r], rescale = rescales[r];
    A *p = s.row(r), *o = query.o.row(first + r), *l = query.l.row(first + r);
    Vec<A> sum = {};
    for (int64_t c = block.c0; c < block.c1; c += kLanes<A>) {
      const Vec<A> e = Exp<A>(Load(p + c) - shift);
      Store(p + c, e);
      sum += e;
    }
    Store(l, Load(l) * rescale + sum);
    if (rescale == 1) continue;
    for (int64_t c = 0; c < v_dim; c += kLanes<A>) Store(o + c, Load(o + c) * rescale);
  }
}

// Writes l and m, which exclude the sink, and keep_scale O / l, where l includes the sink. keep_scale is the factor of
// dropout for kept entries. Row i of a tile of merged heads is query i / merged of head n + i % merged.
template <typename A>
void Finish(const Problem& p, const Operands& in, const ForwardResults& out, int64_t b, A keep_scale, int64_t merged,
            const QueryTile<A>& query) {
  for (int64_t r = 0; r < query.at.rows; ++r) {
    const int64_t row = query.at.i0 + r, n = query.at.n + row % merged;
    const int64_t statistics = (b * p.q_heads + n) * p.q_len + row / merged;
    A l = 0, m = query.m[r];
    for (int lane = 0; lane < kLanes<A>; ++lane) l += query.l.row(r)[lane];
    // The maximum may have lost a NaN; the sum has not. A score of +inf makes l NaN, too, but then m is correct.
    if (l != l && m != kInfinity<A>) m = l;
    const WithSink<A> sums(p, in, b, n, m, l);
    const A factor = keep_scale * sums.alpha / sums.l;
    A* o = query.o.row(r);
    for (int64_t c = 0; c < p.v_dim; ++c) o[c] = l == 0 ? 0 : o[c] * factor;
    static_cast<A*>(out.l)[statistics] = l;
    static_cast<A*>(out.m)[statistics] = m;
  }
  ForEachPart(p, query.at, merged, out.o, p.output_dtype(), b, p.v_dim,
              [&](int64_t r, int64_t count, Rows rows) { StoreRows(FromRow(query.o, r), count, p.v_dim, rows); });
}

template <typename A>
void Forward(const Problem& p, const Operands& in, const ForwardResults& out, Workers& workers) {
  if (p.kv_heads == 0) return;  // no heads at all, and Units would divide by 0
  const int64_t merged = MergedHeads(p);
  const Units units(p, workers.threads(), merged);
  const auto attend = [&](int64_t index, char* memory) {
    const auto unit = units[index];
    const int64_t b = unit.b;
    Scratch<A> scratch(p, memory, units.unit_tiles, units.tile_rows);
    const Scores<A> scores(p, in, b, &scratch.programs, merged);

    for (int64_t t = 0; t < unit.count; ++t) {
      QueryTile<A>& query = scratch.queries[t];
      query.at = units.TileOf(unit, t);
      const int64_t rows = query.at.rows;
      ForEachPart(p, query.at, merged, in.query, p.dtype, b, p.qk_dim, [&](int64_t r, int64_t count, Rows from) {
        LoadRows(from, count, p.qk_dim, *static_cast<const A*>(in.scale), FromRow(query.q, r));
      });
      Zero(query.o, rows, query.o.stride);
      Zero(query.l, rows, kLanes<A>);
      for (int64_t r = 0; r < RoundUp(rows, kLanes<A>); ++r) query.m[r] = -kInfinity<A>;
    }

    const auto load = [&](int64_t j0, int64_t columns) {
      LoadKeys(p, in, p.page > 0 ? in.key_pages : in.key, b, unit.head, p.qk_dim, j0, columns, scratch.k);
      TransposeRows(scratch.k, columns, p.qk_dim, scratch.k_transposed);
      if (p.latent) return;  // V is the start of K
      LoadKeys(p, in, p.page > 0 ? in.value_pages : in.value, b, unit.head, p.v_dim, j0, columns, scratch.v);
    };
    WalkKeys(p, scores, scratch.queries, unit.count, load, [&](QueryTile<A>& query, const Block& block) {
      const int64_t n = query.at.n, width = block.c1 - block.c0;
      // S = τ Q Kᵀ; query.q includes τ
      Multiply(AsIs(query.q), FromColumn(scratch.k_transposed, block.c0), FromColumn(scratch.s, block.c0),
               query.at.rows, width, p.qk_dim, Into::kNew);
      // Masks S, then computes P, l and m, for few rows at a time. They stay in the L1 cache.
      for (int64_t r = 0; r < block.rows; r += kLanes<A>) {
        const Block some = block.Rows(r, kLanes<A>);
        scores.FromProducts(FromRow(scratch.s, r), some, n);
        OnlineSoftmax(FromRow(scratch.s, r), some, p.v_dim, query);
      }
      // O <- O + Z P V, without the scale of Z
      scratch.dropout_mask.Generate(in, block, b, n);
      scratch.dropout_mask.Apply(block, A(1), scratch.s, scratch.s);
      Multiply(AsIs(FromColumn(scratch.s, block.c0)), FromRow(scratch.v, block.c0), query.o, query.at.rows, p.v_dim,
               width, Into::kSum);
    });
    for (int64_t t = 0; t < unit.count; ++t)
      Finish(p, in, out, b, scratch.dropout_mask.scale, merged, scratch.queries[t]);
  };
  workers.For(units.count(), Scratch<A>(p, nullptr, units.unit_tiles, units.tile_rows).bytes, attend);
}

}  // namespace

void Forward(const Problem& p, const Operands& in, const ForwardResults& out, Workers& workers) {
  p.dtype == DType::kF64 ? Forward<double>(p, in, out, workers) : Forward<float>(p, in, out, workers);
}

}  // namespace jax_flash::JAX_FLASH_ISA
