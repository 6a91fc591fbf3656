// The backward pass: Algorithm 4 of the paper. The outer loop is over K and V, so dK and dV of a tile are written once.
// dQ is accumulated in memory. P is recomputed from Q, K, l and m.
#include "common/problem.h"
#include "cpu_src/captured_gradient.h"
#include "cpu_src/division.h"
#include "cpu_src/dropout_mask.h"
#include "cpu_src/kernels.h"
#include "cpu_src/scores.h"
#include "cpu_src/sink.h"
#include "cpu_src/tile.h"

namespace jax_flash::JAX_FLASH_ISA {
namespace {

template <typename A>
struct Scratch {
  Tile<A> k, k_transposed, v, v_transposed, dk, dv;  // for a tile of K and V
  Tile<A> q, d_o, p, zp, ds;                         // for a tile of Q; zp is Z P
  Trace<A> trace;
  DropoutMask<A> dropout_mask;
  Programs<A> programs;
  int64_t bytes;

  Scratch(const Problem& problem, char* memory) {
    Carver carver(memory);
    k = carver.NewTile<A>(kTileColumns, problem.qk_dim);
    k_transposed = carver.NewTile<A>(problem.qk_dim, kTileColumns);
    v = carver.NewTile<A>(kTileColumns, problem.v_dim);
    v_transposed = carver.NewTile<A>(problem.v_dim, kTileColumns);
    dk = carver.NewTile<A>(kTileColumns, problem.qk_dim);
    dv = carver.NewTile<A>(kTileColumns, problem.v_dim);
    q = carver.NewTile<A>(kTileRows, problem.qk_dim);
    d_o = carver.NewTile<A>(kTileRows, problem.v_dim);
    p = carver.NewTile<A>(kTileRows, kTileColumns);
    ds = carver.NewTile<A>(kTileRows, kTileColumns);
    trace = Trace<A>(problem, &carver);
    dropout_mask = DropoutMask<A>(problem, &carver);
    programs = Programs<A>(problem, &carver);
    zp = dropout_mask.NewProduct(p, &carver);
    bytes = carver.used();
  }
};

template <typename A>
struct OutputTiles {
  Tile<A> o, d_o;
  int64_t bytes;

  OutputTiles(const Problem& p, char* memory) {
    Carver carver(memory);
    o = carver.NewTile<A>(kTileRows, p.v_dim);
    d_o = carver.NewTile<A>(kTileRows, p.v_dim);
    bytes = carver.used();
  }
};

// Writes D_i = dO_i · O_i - g_i dlogsumexp_i as [B, N, T]. Also writes each row's contribution to the gradient of its
// sink.
//
// P includes the sink (WithSink), but the given m, l and dlogsumexp exclude it. The softmax without the sink is g P
// with g = WithSink::Growth. So dlogsumexp adds P g dlogsumexp to dS.
template <typename A>
A* ComputeD(const Problem& p, const Operands& in, const Cotangents& given, const BackwardResults& out,
            Workers& workers) {
  A* const d = reinterpret_cast<A*>(workers.Allocate(p.batch * p.q_heads * p.q_len * int64_t(sizeof(A))));
  const int64_t tiles = RoundUp(p.q_len, kTileRows) / kTileRows;
  workers.For(p.batch * p.q_heads * tiles, OutputTiles<A>(p, nullptr).bytes, [&](int64_t unit, char* memory) {
    const OutputTiles<A> scratch(p, memory);
    const Tile<A> o = scratch.o, d_o = scratch.d_o;
    const int64_t head = unit / tiles, i0 = unit % tiles * kTileRows, rows = Min(kTileRows, p.q_len - i0);
    const int64_t b = head / p.q_heads, n = head % p.q_heads;
    LoadRows(HeadRows(given.o, p.output_dtype(), b, i0, p.q_len, n, p.q_heads, p.v_dim), rows, p.v_dim, A(1), o);
    LoadRows(HeadRows(given.d_o, p.dtype, b, i0, p.q_len, n, p.q_heads, p.v_dim), rows, p.v_dim, A(1), d_o);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = head * p.q_len + i0 + r;
      const A l = static_cast<const A*>(given.l)[row];
      const WithSink<A> with_sink(p, in, b, n, static_cast<const A*>(given.m)[row], l);
      if (l == 0) {  // an empty row: its cotangents may be NaN
        d[row] = 0;
        with_sink.StoreGradient(p, out, row, 0);
        continue;
      }
      Vec<A> products = {};
      for (int64_t c = 0; c < p.v_dim; c += kLanes<A>) products += Load(o.row(r) + c) * Load(d_o.row(r) + c);
      A sum = 0;
      for (int lane = 0; lane < kLanes<A>; ++lane) sum += products[lane];
      d[row] = sum - (p.dlogsumexp ? static_cast<const A*>(given.dlogsumexp)[row] * with_sink.Growth(l) : 0);
      with_sink.StoreGradient(p, out, row, sum);
    }
  });
  return d;
}

// The inner steps for one batch entry, with one worker's scratch.
template <typename A>
struct Backpropagation {
  const Problem& p;
  const Operands& in;
  const Cotangents& given;
  const A* const d;
  const A scale;  // τ
  const int64_t b;
  Scratch<A> scratch;
  const Scores<A> scores;

  Backpropagation(const Problem& problem, const Operands& operands, const Cotangents& cotangents, const A* d, int64_t b,
                  char* memory)
      : p(problem),
        in(operands),
        given(cotangents),
        d(d),
        scale(*static_cast<const A*>(in.scale)),
        b(b),
        scratch(p, memory),
        scores(p, in, b, &scratch.programs) {}

  void LoadKeysAndValues(int64_t head, int64_t j0, int64_t columns) {
    const int64_t count = scores.WithinLength(j0, columns);
    LoadRows(HeadRows(in.key, p.dtype, b, j0, p.kv_len, head, p.kv_heads, p.qk_dim), count, p.qk_dim, A(1), scratch.k);
    TransposeRows(scratch.k, count, p.qk_dim, scratch.k_transposed);
    LoadRows(HeadRows(in.value, p.dtype, b, j0, p.kv_len, head, p.kv_heads, p.v_dim), count, p.v_dim, A(1), scratch.v);
    TransposeRows(scratch.v, count, p.v_dim, scratch.v_transposed);
  }

  void LoadQueries(int64_t n, int64_t i0, int64_t rows) {
    LoadRows(HeadRows(in.query, p.dtype, b, i0, p.q_len, n, p.q_heads, p.qk_dim), rows, p.qk_dim, scale, scratch.q);
    LoadRows(HeadRows(given.d_o, p.dtype, b, i0, p.q_len, n, p.q_heads, p.v_dim), rows, p.v_dim, A(1), scratch.d_o);
    // An empty row may contain NaN, and P = 0 times NaN would reach dK and dV.
    const A* const l = static_cast<const A*>(given.l) + (b * p.q_heads + n) * p.q_len + i0;
    for (int64_t r = 0; r < rows; ++r) {
      if (l[r] != 0) continue;
      Zero(FromRow(scratch.q, r), 1, scratch.q.stride);
      Zero(FromRow(scratch.d_o, r), 1, scratch.d_o.stride);
    }
  }

  // Computes P and Z P.
  void ComputeP(const Block& block, int64_t n) {
    const Tile<A> s = FromColumn(scratch.p, block.c0);
    // S = τ Q Kᵀ
    Multiply(AsIs(scratch.q), FromColumn(scratch.k_transposed, block.c0), s, block.rows, block.c1 - block.c0, p.qk_dim,
             Into::kNew);
    // S, masked; P = exp(S - m) / l, or 0 in an empty row
    const int64_t statistics = (b * p.q_heads + n) * p.q_len + block.i0;
    for (int64_t r = 0; r < block.rows; ++r) {
      if (r % kScoredRows == 0) {
        scores.FromProducts(FromRow(scratch.p, r), block.Rows(r, kScoredRows), n, scratch.trace.FromRow(r));
      }
      const WithSink<A> sums(p, in, b, n, static_cast<const A*>(given.m)[statistics + r],
                             static_cast<const A*>(given.l)[statistics + r]);
      const A shift = sums.m == -kInfinity<A> ? 0 : sums.m, inverse = sums.l == 0 ? 0 : 1 / sums.l;
      A* row = scratch.p.row(r);
      for (int64_t c = block.c0; c < block.c1; c += kLanes<A>) Store(row + c, Exp<A>(Load(row + c) - shift) * inverse);
    }
    scratch.dropout_mask.Generate(in, block, b, n);
    scratch.dropout_mask.Apply(block, scratch.dropout_mask.scale, scratch.p, scratch.zp);
  }

  // Computes dS, after P. With a score_mod, dS is the cotangent of its argument.
  void ComputeDS(const Block& block, int64_t n, const CapturedSums<A>* sums = nullptr) {
    const Tile<A> ds = scratch.ds;
    // dP = Z dO Vᵀ
    Multiply(AsIs(scratch.d_o), FromColumn(scratch.v_transposed, block.c0), FromColumn(ds, block.c0), block.rows,
             block.c1 - block.c0, p.v_dim, Into::kNew);
    scratch.dropout_mask.Apply(block, scratch.dropout_mask.scale, ds, ds);
    // dS = P (dP - D)
    const A* const d_rows = d + (b * p.q_heads + n) * p.q_len + block.i0;
    for (int64_t r = 0; r < block.rows; ++r) {
      A* row = ds.row(r);
      for (int64_t c = block.c0; c < block.c1; c += kLanes<A>) {
        Store(row + c, Load(scratch.p.row(r) + c) * (Load(row + c) - d_rows[r]));
      }
    }
    scores.ThroughScoreMod(ds, block, n, scratch.trace, sums);
  }

  // dbias <- dbias + dS, summed over broadcast dimensions.
  void AddToBias(const Block& block, Tile<A> dbias) const {
    for (int64_t r = 0; r < block.rows; ++r) {
      const A* ds = scratch.ds.row(r);
      A* to = dbias.row(r);
      if (p.score.bias.columns) {
        for (int64_t c = block.c0; c < block.c1; ++c) to[c] += ds[c];
      } else {
        Vec<A> sum = {};
        for (int64_t c = block.c0; c < block.c1; c += kLanes<A>) sum += Load(ds + c);
        A total = 0;
        for (int lane = 0; lane < kLanes<A>; ++lane) total += sum[lane];
        to[0] += total;
      }
    }
  }
};

// With deterministic=True, the work is divided for this number of threads on every machine. It is enough for most
// machines, and keeps the partial sums small.
constexpr int64_t kDeterministicThreads = 16;

// The maximum memory for copies of the gradients of captured arrays.
constexpr double kCopyBytes = double(int64_t(64) << 20);

// Divides the work so that copies of the gradients of captured arrays fit into this memory.
template <typename A>
WorkSplit DivideWithinMemory(const Problem& p, const Operands& in, const BackwardResults& out, const Workers& workers) {
  const int64_t threads = p.deterministic ? kDeterministicThreads : workers.threads();
  // Tries all combinations of undivided dims until the copies fit. Bit 0 keeps the kv tiles of a head undivided, bit 1
  // the batch, and bit 2 the heads.
  for (unsigned bits = 0;; ++bits) {
    const Undivided undivided = {/*batch=*/bool(bits & 2), /*heads=*/bool(bits & 4), /*parts=*/bool(bits & 1)};
    const WorkSplit division = DivideForThreads<A>(p, undivided, threads);
    if (bits == 7 || CapturedGradients<A>::Memory(p, in, out, division) <= kCopyBytes) return division;
  }
}

// dQ as a sum of partial results.
template <typename A>
class QueryGradient {
 public:
  QueryGradient(const Problem& p, void* dq, int64_t parts, Workers& workers) : p_(p), dq_(dq), parts_(parts) {
    if (!p.dq) return;
    // The first part is accumulated in the result itself, if that has the accumulation dtype and whole vectors.
    in_place_ = p.output_dtype() == p.accumulation_dtype() && p.qk_dim % kLanes<A> == 0;
    const int64_t allocated = in_place_ ? parts_ - 1 : parts_;
    if (allocated) partials_ = reinterpret_cast<A*>(workers.Allocate(allocated * DQBytes<A>(p)));
  }

  // dQ of a query head, from row i0 on.
  Tile<A> Part(int64_t part, int64_t b, int64_t n, int64_t i0) const {
    if (in_place_ && part == 0) {
      return {static_cast<A*>(HeadRows(dq_, p_.output_dtype(), b, i0, p_.q_len, n, p_.q_heads, p_.qk_dim).data),
              p_.q_heads * p_.qk_dim};
    }
    const int64_t width = RoundUp(p_.qk_dim, kLanes<A>);
    const int64_t partial = in_place_ ? part - 1 : part, head = (partial * p_.batch + b) * p_.q_heads + n;
    return {partials_ + (head * p_.q_len + i0) * width, width};
  }

  // dQ = Σ parts
  void Sum(Workers& workers) const {
    if (in_place_ && parts_ == 1) return;
    const int64_t tiles = RoundUp(p_.q_len, kTileRows) / kTileRows;
    workers.For(p_.batch * p_.q_heads * tiles, 0, [&](int64_t unit, char*) {
      const int64_t head = unit / tiles, i0 = unit % tiles * kTileRows, rows = Min(kTileRows, p_.q_len - i0);
      const int64_t b = head / p_.q_heads, n = head % p_.q_heads;
      const Tile<A> sum = Part(0, b, n, i0);
      for (int64_t part = 1; part < parts_; ++part) {
        const Tile<A> term = Part(part, b, n, i0);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < p_.qk_dim; ++c) sum.row(r)[c] += term.row(r)[c];
        }
      }
      if (in_place_) return;
      StoreRows(sum, rows, p_.qk_dim, HeadRows(dq_, p_.output_dtype(), b, i0, p_.q_len, n, p_.q_heads, p_.qk_dim));
    });
  }

 private:
  const Problem& p_;
  void* dq_;
  int64_t parts_;
  bool in_place_ = false;
  A* partials_ = nullptr;
};

// dbias of a head, from row i0 and column j0 on. If the bias is broadcast over rows or columns, it has only one of
// them.
template <typename A>
Tile<A> BiasTile(const Problem& p, const BackwardResults& out, int64_t b, int64_t n, int64_t i0, int64_t j0) {
  const HeadOffset offset(p, p.score.bias, b, n);
  return {static_cast<A*>(out.dbias) + offset.At(i0, j0), offset.row_stride};
}

template <typename A>
void ZeroBias(const Problem& p, Tile<A> dbias, int64_t rows, int64_t columns) {
  Zero(dbias, p.score.bias.rows ? rows : 1, p.score.bias.columns ? columns : 1);
}

// Computes dQ, dK and dV for a head of K and V and its group of query heads, or for one part of its tiles. Also
// computes dbias if `division` fuses it.
template <typename A>
void BackwardHead(Backpropagation<A>& step, const WorkSplit& division, const QueryGradient<A>& dq,
                  const BackwardResults& out, const CapturedSums<A>* sums, int64_t head, int64_t part) {
  const Problem& p = step.p;
  const int64_t b = step.b, group = p.group();
  const Tiling row_tiles = RowTiles(p), column_tiles = ColumnTiles(p);
  Scratch<A>& scratch = step.scratch;
  if (p.dq) {
    for (int64_t n = head * group; n < (head + 1) * group; ++n) {
      Zero(dq.Part(part, b, n, 0), p.q_len, RoundUp(p.qk_dim, kLanes<A>));
    }
  }
  for (int64_t column_tile = part; column_tile < column_tiles.count(); column_tile += division.parts) {
    const auto [j0, columns] = column_tiles[column_tile];
    step.LoadKeysAndValues(head, j0, columns);
    // From here on K is only used for dQ = τ dX K. dX is the cotangent of X = τ Q Kᵀ (scores.h).
    for (int64_t r = 0; r < columns; ++r) {
      for (int64_t c = 0; c < p.qk_dim; ++c) scratch.k.row(r)[c] *= step.scale;
    }
    Zero(scratch.dk, columns, scratch.dk.stride);
    Zero(scratch.dv, columns, scratch.dv.stride);
    for (int64_t tile = 0; tile < row_tiles.count() * group; ++tile) {
      const auto [i0, rows] = row_tiles[tile / group];
      const int64_t n = head * group + tile % group;
      const Block block = step.scores.Visible(n, i0, rows, j0, columns);
      Tile<A> dbias = {};
      if (division.dbias) {
        dbias = BiasTile<A>(p, out, b, n, i0, j0);
        // Is this the first term of these entries of dbias? A fused dbias is never broadcast over columns (division.h).
        const bool first =
            (p.score.bias.batch || b == 0) && (p.score.bias.heads || n == 0) && (p.score.bias.rows || i0 == 0);
        if (first) ZeroBias(p, dbias, rows, columns);
      }
      if (block.empty()) continue;
      const int64_t width = block.c1 - block.c0;
      step.LoadQueries(n, i0, block.rows);
      step.ComputeP(block, n);
      // dV <- dV + (Z P)ᵀ dO
      if (p.dv) {
        Multiply(Transposed(FromColumn(scratch.zp, block.c0)), scratch.d_o, FromRow(scratch.dv, block.c0), width,
                 p.v_dim, block.rows, Into::kSum);
      }
      if (!p.dq && !p.dk && !division.dbias && !sums) continue;
      step.ComputeDS(block, n, sums);
      if (division.dbias) step.AddToBias(block, dbias);
      step.scores.ThroughSoftCap(scratch.ds, block, scratch.trace);
      const Tile<A> dx = FromColumn(scratch.ds, block.c0);
      // dQ <- dQ + τ dX K
      if (p.dq) {
        Multiply(AsIs(dx), FromRow(scratch.k, block.c0), dq.Part(part, b, n, i0), block.rows, p.qk_dim, width,
                 Into::kSum);
      }
      // dK <- dK + dXᵀ (τ Q)
      if (p.dk) {
        Multiply(Transposed(dx), scratch.q, FromRow(scratch.dk, block.c0), width, p.qk_dim, block.rows, Into::kSum);
      }
    }
    if (p.dk) {
      StoreRows(scratch.dk, columns, p.qk_dim, HeadRows(out.dk, p.dtype, b, j0, p.kv_len, head, p.kv_heads, p.qk_dim));
    }
    if (p.dv) {
      StoreRows(scratch.dv, columns, p.v_dim, HeadRows(out.dv, p.dtype, b, j0, p.kv_len, head, p.kv_heads, p.v_dim));
    }
  }
}

template <typename A>
void BackwardQKV(const Problem& p, const Operands& in, const Cotangents& given, const BackwardResults& out, const A* d,
                 const WorkSplit& division, const CapturedGradients<A>& captured, Workers& workers) {
  const QueryGradient<A> dq(p, out.dq, division.parts, workers);
  const Split batch = division.batch, heads = division.heads;
  const auto propagate = [&](int64_t unit, char* memory) {
    const int64_t part = unit % division.parts, head_unit = unit / division.parts % heads.units;
    const int64_t batch_unit = unit / division.parts / heads.units;
    for (int64_t b = batch.Begin(batch_unit); b < batch.End(batch_unit); ++b) {
      Backpropagation<A> step(p, in, given, d, b, memory);
      const CapturedSums<A> sums = captured.Sums(b, batch_unit, head_unit, part);
      for (int64_t head = heads.Begin(head_unit); head < heads.End(head_unit); ++head) {
        BackwardHead(step, division, dq, out, captured.requested() ? &sums : nullptr, head, part);
      }
    }
  };
  workers.For(division.units(), Scratch<A>(p, nullptr).bytes, propagate);
  if (p.dq) dq.Sum(workers);
}

// dbias = dS, summed over broadcast dimensions, in a separate pass that recomputes P and dS. Each unit owns a tile of
// dbias, and sums its terms in a fixed order.
template <typename A>
void BackwardBias(const Problem& p, const Operands& in, const Cotangents& given, const BackwardResults& out, const A* d,
                  Workers& workers) {
  const Extent& extent = p.score.bias;
  const Tiling row_tiles = RowTiles(p), column_tiles = ColumnTiles(p);
  const Split batch = Split::Of(p.batch, !extent.batch), heads = Split::Of(p.q_heads, !extent.heads);
  const Split rows = Split::Of(row_tiles.count(), !extent.rows);
  const Split columns = Split::Of(column_tiles.count(), !extent.columns);

  const auto sum = [&](int64_t unit, char* memory) {
    const int64_t row_unit = unit % rows.units, column_unit = unit / rows.units % columns.units;
    const int64_t head_unit = unit / (rows.units * columns.units) % heads.units;
    const int64_t batch_unit = unit / (rows.units * columns.units * heads.units);
    const Tiling::Range own_rows = row_tiles[row_unit], own_columns = column_tiles[column_unit];
    ZeroBias(p, BiasTile<A>(p, out, batch_unit, head_unit, own_rows.begin, own_columns.begin), own_rows.size,
             own_columns.size);

    for (int64_t b = batch.Begin(batch_unit); b < batch.End(batch_unit); ++b) {
      Backpropagation<A> step(p, in, given, d, b, memory);
      for (int64_t n = heads.Begin(head_unit); n < heads.End(head_unit); ++n) {
        for (int64_t column_tile = columns.Begin(column_unit); column_tile < columns.End(column_unit); ++column_tile) {
          const auto [j0, tile_columns] = column_tiles[column_tile];
          bool loaded = false;
          for (int64_t row_tile = rows.Begin(row_unit); row_tile < rows.End(row_unit); ++row_tile) {
            const auto [i0, tile_rows] = row_tiles[row_tile];
            const Block block = step.scores.Visible(n, i0, tile_rows, j0, tile_columns);
            if (block.empty()) continue;
            if (!loaded) step.LoadKeysAndValues(n / p.group(), j0, tile_columns);
            loaded = true;
            step.LoadQueries(n, i0, block.rows);
            step.ComputeP(block, n);
            step.ComputeDS(block, n);
            step.AddToBias(block, BiasTile<A>(p, out, b, n, i0, j0));
          }
        }
      }
    }
  };
  workers.For(batch.units * heads.units * rows.units * columns.units, Scratch<A>(p, nullptr).bytes, sum);
}

template <typename A>
void Backward(const Problem& p, const Operands& in, const Cotangents& given, const BackwardResults& out,
              Workers& workers) {
  const WorkSplit division = DivideWithinMemory<A>(p, in, out, workers);
  const CapturedGradients<A> captured(p, in, out, division, workers);
  const A* d = p.needs_ds() || p.gradients_of_rows() ? ComputeD<A>(p, in, given, out, workers) : nullptr;
  if ((p.dq || p.dk || p.dv || captured.requested()) && p.kv_heads > 0) {
    BackwardQKV<A>(p, in, given, out, d, division, captured, workers);
  }
  captured.Sum(workers);
  if (p.dbias && !division.dbias) BackwardBias<A>(p, in, given, out, d, workers);
}

}  // namespace

void Backward(const Problem& p, const Operands& in, const Cotangents& given, const BackwardResults& out,
              Workers& workers) {
  p.dtype == DType::kF64 ? Backward<double>(p, in, given, out, workers) : Backward<float>(p, in, given, out, workers);
}

}  // namespace jax_flash::JAX_FLASH_ISA
