// The tangent of the forward, along tangents of its operands. With the tangent Ṡ of the scores and μ_i = Σ_j P_ij Ṡ_ij,
// it is Ȯ = (Z∘P∘Ṡ) V + (Z∘P) V̇ - μ∘O. P is recomputed from Q, K, l and m. The loops are as in the forward.
//
// O does not change if the same number is added to all Ṡ of a row. So a reference near μ is subtracted from Ṡ.
// Otherwise a large, nearly constant Ṡ would give the difference of two large numbers.
#include "common/problem.h"
#include "cpu_src/dropout_mask.h"
#include "cpu_src/kernels.h"
#include "cpu_src/scores.h"
#include "cpu_src/sink.h"
#include "cpu_src/tile.h"
#include "cpu_src/units.h"

namespace jax_flash::JAX_FLASH_ISA {
namespace {

// A tile of Q and its running results. P is not divided by l yet.
template <typename A>
struct QueryTile {
  Tile<A> q;      // Q̇ and Q, concatenated: Ṡ = τ [Q̇ Q] [K K̇]ᵀ is one product
  Tile<A> a;      // Σ_j Z P (Ṡ - reference) V + Z P V̇
  Tile<A> moved;  // Σ_j P (Ṡ - reference), a sum for each lane
  A* m;
  A* reference;
  bool* referred;  // does the row have a reference yet?
  RowTile at;
};

template <typename A>
struct Scratch {
  QueryTile<A> queries[kUnitTiles];
  Tile<A> k, keys, v, v_tangent, s, s_tangent;  // keys: Kᵀ above K̇ᵀ
  Trace<A> trace;
  DropoutMask<A> dropout_mask;
  Programs<A> programs;
  int64_t bytes;

  Scratch(const Problem& p, char* memory, int64_t tiles, int64_t tile_rows) {
    Carver carver(memory);
    for (int64_t t = 0; t < tiles; ++t) {
      QueryTile<A>& query = queries[t];
      query.q = carver.NewTile<A>(tile_rows, p.qk_dim + RoundUp(p.qk_dim, kLanes<A>));
      query.a = carver.NewTile<A>(tile_rows, p.v_dim);
      query.moved = carver.NewTile<A>(tile_rows, kLanes<A>);
      query.m = carver.Array<A>(tile_rows);
      query.reference = carver.Array<A>(tile_rows);
      query.referred = carver.Array<bool>(tile_rows);
    }
    k = carver.NewTile<A>(kTileColumns, p.qk_dim);
    keys = carver.NewTile<A>(2 * p.qk_dim, kTileColumns);
    v = carver.NewTile<A>(kTileColumns, p.v_dim);
    if (p.value_tangent) v_tangent = carver.NewTile<A>(kTileColumns, p.v_dim);
    s = carver.NewTile<A>(kTileRows, kTileColumns);
    if (p.scores_move()) s_tangent = carver.NewTile<A>(kTileRows, kTileColumns);
    trace = Trace<A>(p, &carver);
    dropout_mask = DropoutMask<A>(p, &carver);
    programs = Programs<A>(p, &carver);
    bytes = carver.used();
  }
};

// The inner steps for one batch entry, with one worker's scratch.
template <typename A>
struct Pass {
  const Problem& p;
  const Operands& in;
  const Tangents& given;
  const int64_t b;
  Scratch<A> scratch;
  const Scores<A> scores;

  Pass(const Problem& p, const Operands& in, const Tangents& given, int64_t b, char* memory, const Units& units)
      : p(p),
        in(in),
        given(given),
        b(b),
        scratch(p, memory, units.unit_tiles, units.tile_rows),
        scores(p, in, b, &scratch.programs) {}

  int64_t Statistics(const RowTile& at) const { return (b * p.q_heads + at.n) * p.q_len + at.i0; }

  void LoadQueries(QueryTile<A>& query) const {
    const auto [n, i0, rows] = query.at;
    const A scale = *static_cast<const A*>(in.scale);
    if (p.query_tangent) {
      LoadRows(HeadRows(given.query_tangent, p.output_dtype(), b, i0, p.q_len, n, p.q_heads, p.qk_dim), rows, p.qk_dim,
               scale, query.q);
    }
    LoadRows(HeadRows(in.query, p.dtype, b, i0, p.q_len, n, p.q_heads, p.qk_dim), rows, p.qk_dim, scale,
             FromColumn(query.q, p.qk_dim));
    Zero(query.a, rows, query.a.stride);
    Zero(query.moved, rows, query.moved.stride);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = Statistics(query.at) + r;
      const A m = static_cast<const A*>(given.m)[row];
      query.m[r] = m == -kInfinity<A> ? 0 : m;
      query.reference[r] = 0;
      query.referred[r] = false;
      // An empty row may contain NaN.
      if (static_cast<const A*>(given.l)[row] == 0) Zero(FromRow(query.q, r), 1, query.q.stride);
    }
  }

  void LoadKeys(int64_t head, int64_t j0, int64_t columns) const {
    const auto rows = [&](const void* array, int64_t dim) {
      return HeadRows(array, p.dtype, b, j0, p.kv_len, head, p.kv_heads, dim);
    };
    LoadRows(rows(in.key, p.qk_dim), columns, p.qk_dim, A(1), scratch.k);
    TransposeRows(scratch.k, columns, p.qk_dim, scratch.keys);
    if (p.key_tangent) {
      LoadRows(rows(given.key_tangent, p.qk_dim), columns, p.qk_dim, A(1), scratch.k);
      TransposeRows(scratch.k, columns, p.qk_dim, FromRow(scratch.keys, p.qk_dim));
    }
    LoadRows(rows(in.value, p.v_dim), columns, p.v_dim, A(1), scratch.v);
    if (p.value_tangent) LoadRows(rows(given.value_tangent, p.v_dim), columns, p.v_dim, A(1), scratch.v_tangent);
  }

  // S = τ Q Kᵀ and its tangent, both before soft cap, bias and programs.
  void Products(const QueryTile<A>& query, const Block& block) const {
    const int64_t width = block.c1 - block.c0, dim = p.qk_dim;
    const Tile<A> keys = FromColumn(scratch.keys, block.c0);
    Multiply(AsIs(FromColumn(query.q, dim)), keys, FromColumn(scratch.s, block.c0), block.rows, width, dim, Into::kNew);
    if (!p.scores_move()) return;
    const Tile<A> to = FromColumn(scratch.s_tangent, block.c0);
    if (!p.query_tangent && !p.key_tangent) return Zero(to, block.rows, RoundUp(width, kLanes<A>));
    const int64_t first = p.query_tangent ? 0 : dim, last = p.key_tangent ? 2 * dim : dim;
    Multiply(AsIs(FromColumn(query.q, first)), FromRow(keys, first), to, block.rows, width, last - first, Into::kNew);
  }

  // Replaces S by P, and Ṡ by P (Ṡ - reference). Adds the latter to `moved`.
  void Weights(QueryTile<A>& query, const Block& block) const {
    for (int64_t r = 0; r < block.rows; r += kScoredRows) {
      scores.FromProducts(FromRow(scratch.s, r), block.Rows(r, kScoredRows), query.at.n, scratch.trace.FromRow(r));
    }
    if (p.scores_move()) scores.TangentFromProducts(scratch.s_tangent, block, query.at.n, scratch.trace, given);
    for (int64_t r = 0; r < block.rows; ++r) {
      A* const s = scratch.s.row(r);
      const A m = query.m[r];
      for (int64_t c = block.c0; c < block.c1; c += kLanes<A>) Store(s + c, Exp<A>(Load(s + c) - m));
      if (!p.scores_move()) continue;
      A* const s_tangent = scratch.s_tangent.row(r);
      if (!query.referred[r]) Refer(query, r, block);
      const A reference = query.reference[r];
      Vec<A> sum = Load(query.moved.row(r));
      for (int64_t c = block.c0; c < block.c1; c += kLanes<A>) {
        const Vec<A> weight = Load(s + c);
        // Ṡ of a masked entry may be NaN.
        const Vec<A> product = weight == 0 ? Vec<A>{} : weight * (Load(s_tangent + c) - reference);
        Store(s_tangent + c, product);
        sum += product;
      }
      Store(query.moved.row(r), sum);
    }
  }

  // The reference of a row is the mean of Ṡ in the first tile in which P is not 0.
  void Refer(QueryTile<A>& query, int64_t r, const Block& block) const {
    Vec<A> weights = {}, products = {};
    for (int64_t c = block.c0; c < block.c1; c += kLanes<A>) {
      const Vec<A> weight = Load(scratch.s.row(r) + c);
      weights += weight;
      products += weight == 0 ? Vec<A>{} : weight * Load(scratch.s_tangent.row(r) + c);
    }
    A weight = 0, product = 0;
    for (int lane = 0; lane < kLanes<A>; ++lane) weight += weights[lane], product += products[lane];
    if (weight == 0) return;
    query.reference[r] = product / weight;
    query.referred[r] = true;
  }

  void Add(QueryTile<A>& query, const Block& block) const {
    Products(query, block);
    Weights(query, block);
    const int64_t width = block.c1 - block.c0;
    const auto add = [&](Tile<A> weights, Tile<A> values, Tile<A> to) {
      Multiply(AsIs(FromColumn(weights, block.c0)), FromRow(values, block.c0), to, block.rows, p.v_dim, width,
               Into::kSum);
    };
    scratch.dropout_mask.Generate(in, block, b, query.at.n);
    if (p.scores_move()) {
      scratch.dropout_mask.Apply(block, A(1), scratch.s_tangent, scratch.s_tangent);
      add(scratch.s_tangent, scratch.v, query.a);
    }
    scratch.dropout_mask.Apply(block, A(1), scratch.s, scratch.s);
    if (p.value_tangent) add(scratch.s, scratch.v_tangent, query.a);
  }

  // Ȯ = (Z∘P∘Ṡ) V + (Z∘P) V̇ - μ∘O, where μ includes the sink; the tangent of l excludes it.
  void Finish(const QueryTile<A>& query, const TangentResults& out) const {
    const int64_t n = query.at.n, rows = query.at.rows;
    const auto rows_of = [&](const void* array, DType dtype) {
      return HeadRows(array, dtype, b, query.at.i0, p.q_len, n, p.q_heads, p.v_dim);
    };
    const Tile<A> o = scratch.v;  // V is no longer needed
    LoadRows(rows_of(given.o, p.o_dtype()), rows, p.v_dim, A(1), o);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = Statistics(query.at) + r;
      const A l = static_cast<const A*>(given.l)[row], reference = query.reference[r];
      A sum = 0;
      for (int lane = 0; lane < kLanes<A>; ++lane) sum += query.moved.row(r)[lane];
      const WithSink<A> sums(p, in, b, n, static_cast<const A*>(given.m)[row], l);
      const A to_p = sums.alpha / sums.l, factor = scratch.dropout_mask.scale * to_p;  // to_p: from exp(S - m) to P
      const A mu = to_p * sum + sums.TermOfMu(p, given, b, n, reference);
      A* const a = query.a.row(r);
      for (int64_t c = 0; c < p.v_dim; ++c) a[c] = l == 0 ? 0 : a[c] * factor - mu * o.row(r)[c];
      if (p.l_tangent) static_cast<A*>(out.l_tangent)[row] = l == 0 ? 0 : sum + l * reference;
    }
    StoreRows(query.a, rows, p.v_dim, rows_of(out.o_tangent, p.output_dtype()));
  }
};

template <typename A>
void Tangent(const Problem& p, const Operands& in, const Tangents& given, const TangentResults& out, Workers& workers) {
  if (p.kv_heads == 0) return;
  const Units units(p, workers.threads());
  const auto differentiate = [&](int64_t index, char* memory) {
    const auto unit = units[index];
    Pass<A> pass(p, in, given, unit.b, memory, units);
    QueryTile<A>* const queries = pass.scratch.queries;
    for (int64_t t = 0; t < unit.count; ++t) {
      queries[t].at = units.TileOf(unit, t);
      pass.LoadQueries(queries[t]);
    }
    if (p.scores_move() || p.value_tangent) {
      WalkKeys(
          p, pass.scores, queries, unit.count,
          [&](int64_t j0, int64_t columns) { pass.LoadKeys(unit.head, j0, columns); },
          [&](QueryTile<A>& query, const Block& block) { pass.Add(query, block); });
    }
    for (int64_t t = 0; t < unit.count; ++t) pass.Finish(queries[t], out);
  };
  workers.For(units.count(), Scratch<A>(p, nullptr, units.unit_tiles, units.tile_rows).bytes, differentiate);
}

}  // namespace

void Tangent(const Problem& p, const Operands& in, const Tangents& given, const TangentResults& out, Workers& workers) {
  p.dtype == DType::kF64 ? Tangent<double>(p, in, given, out, workers) : Tangent<float>(p, in, given, out, workers);
}

}  // namespace jax_flash::JAX_FLASH_ISA
