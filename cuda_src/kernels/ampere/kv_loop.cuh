// Common parts of the Ampere kernels that keep a tile of Q and loop over K and V.
//
// Tiles of S have kRows rows (16 or 32 for each warp) and kKeys columns (a multiple of 16). Shared memory has kStages
// tiles of K and V, at least 2. For wide heads, several warps share rows (ampere/slices.cuh). The host launches a CTA
// of kThreads threads for each q tile of each head of each batch entry. With split-KV, it launches one for each part of
// each tile of each key/value head. With a block mask, each block consists of whole tiles. Partial blocks at the edges
// have the same number of tiles.
#pragma once

#include "ampere/matrix.cuh"
#include "ampere/scores.cuh"
#include "ptx/warp.cuh"
#include "scheduler/lists.cuh"
#include "semantics/tangent.cuh"

namespace jax_flash::ampere {

constexpr int kRows = kTiling.rows;
constexpr int kKeys = kTiling.cols;
constexpr int kWarps = kTiling.groups;
constexpr int kStages = kTiling.stages;

constexpr int kThreads = 32 * kWarps;
constexpr int kRowWarps = kWideHeads ? WideRowWarps(kRows) : kWarps;  // warps with different rows
constexpr int kColumnWarps = kWarps / kRowWarps;                      // warps that share rows
constexpr int kWarpRows = kRows / kRowWarps;
constexpr int kLaneRows = kWarpRows / 8;
static_assert(kWarpRows % 16 == 0 && kKeys % 16 == 0 && kStages >= 2);

// This warp's first row in a tile.
__device__ __forceinline__ int WarpRow() { return threadIdx.x / 32 / kColumnWarps * kWarpRows; }

// The number of rows in all q tiles of a head, or of the heads packed into one, and the number of tiles.
__device__ __forceinline__ int RowsOfHead(const Params& p) { return p.q_len * kPacked; }
__device__ __forceinline__ int TilesOfHead(const Params& p) { return (RowsOfHead(p) + kRows - 1) / kRows; }

// The keys that the rows of the q tile at `row` see.
__device__ __forceinline__ Visible KeysOfTile(const Params& p, int batch, int row) {
  return KeysOf(p, PositionsOf(p, batch), batch, row / kPacked, (row + kRows - 1) / kPacked + 1);
}

// A q tile of a CTA with balanced work, and the kv tiles of it that this CTA computes (ampere/balanced_split.cuh).
struct BalancedPart {
  int tile;         // index of the q tile among the tiles of one head of all batch entries
  int begin, size;  // kv tiles, among those that the q tile sees
  int part;         // the number of this part
};

// This CTA's q tile, and the kv tiles that it sees.
struct QTile {
  int row, head, kv_head, batch;
  int part;          // the number of this part of the keys
  BlockList blocks;  // the blocks that it sees, with a block mask
  Visible keys;

  QTile() = default;
  // CTAs are ordered head by head, so their loads hit L2. With split-KV, one part of all heads comes before the next
  // part, because the heads of a key are adjacent in HBM. Causal tiles with more work come first.
  __device__ __forceinline__ explicit QTile(const Params& p) {
    if constexpr (kListed) {
      constexpr int kTiles = kTilesOfRow<kRows>;
      int list;
      ListOfItem(blockIdx.x / kTiles, BlockRows(p), p.batch * p.q_heads, &head, &list);
      batch = head / p.q_heads;
      head %= p.q_heads;
      blocks = RowList(p, batch, head, list);
      row = FirstRow<kRows>(blocks, blockIdx.x % kTiles);
    } else {
      const int tiles = TilesOfHead(p), tile = blockIdx.x % tiles;
      const int parts = kParts ? p.parts : 1, heads = p.q_heads / kPacked;
      row = (kCausal ? tiles - 1 - tile : tile) * kRows;
      head = blockIdx.x / tiles % heads * kPacked;
      part = blockIdx.x / tiles / heads % parts;
      batch = blockIdx.x / tiles / heads / parts;
    }
    kv_head = head / (p.q_heads / p.kv_heads);
    keys = KeysOfTile(p, batch, row);
    if (kParts) RestrictToPart(p.parts);
  }
  // With balanced work, CTAs of different key/value heads are adjacent, for the same reason.
  __device__ __forceinline__ QTile(const Params& p, const BalancedPart& balanced) : part(balanced.part) {
    const int tiles = TilesOfHead(p);
    row = balanced.tile % tiles * kRows;
    batch = balanced.tile / tiles;
    kv_head = blockIdx.x % p.kv_heads;
    head = kv_head * kPacked;
    keys = KeysOfTile(p, batch, row);
    RestrictToTiles(keys.any_lo / kKeys + balanced.begin, balanced.size);
  }

  // This lane's first row. Its other rows follow at distances of 8.
  __device__ __forceinline__ int LaneRow() const { return row + WarpRow() + threadIdx.x % 32 / 4; }

  // This warp's rows of S, with keys from `part` on in the tile at `column`.
  __device__ __forceinline__ Scores WarpScores(const Params& p, int column, int part = 0) const {
    return Scores(p, batch, head, row + WarpRow(), column + part, KindOfBlock(p, batch, head, row, column));
  }
  // Are all entries of this tile of S visible and, with a bias to look up, within T and S?
  __device__ __forceinline__ bool Every(const Params& p, int column) const {
    return keys.every_lo <= column && column + kKeys <= keys.every_hi && (!kBias || row + kRows <= RowsOfHead(p));
  }

  __device__ __forceinline__ Matrix Query(const Params& p, const void* operand, int dim) const {
    return Matrix(operand, batch, head, p.q_len, p.q_heads, dim);
  }
  __device__ __forceinline__ OutputMatrix Output(const Params& p, const void* array, int dim) const {
    return OutputMatrix(array, batch, head, p.q_len, p.q_heads, dim);
  }
  __device__ __forceinline__ Matrix Key(const Params& p, const void* operand, int dim) const {
    return Matrix(operand, kPage > 0 ? 0 : batch, kv_head, p.kv_len, p.kv_heads, dim);
  }
  // The index of row LaneRow() + 8 h in arrays [batch, head, row], or in arrays of parts.
  __device__ __forceinline__ int64_t Statistic(const Params& p, int h) const {
    if constexpr (kBalanced) {
      return (int64_t(part) * p.kv_heads + kv_head) * kRows + LaneRow() - row + 8 * h;
    } else if constexpr (kParts) {
      const int r = LaneRow() + 8 * h;
      return ((int64_t(part) * p.batch + batch) * p.q_heads + head + r % kPacked) * p.q_len + r / kPacked;
    }
    return (int64_t(batch) * p.q_heads + head) * p.q_len + LaneRow() + 8 * h;
  }

 private:
  // Restricts `keys` to this part's kv tiles, possibly none. The first parts have one tile more than the last ones.
  __device__ __forceinline__ void RestrictToPart(int parts) {
    const int first = keys.any_lo / kKeys, tiles = (keys.any_hi + kKeys - 1) / kKeys - first;
    const int share = tiles / parts, more = tiles % parts;
    RestrictToTiles(first + part * share + min(part, more), share + (part < more ? 1 : 0));
  }
  __device__ __forceinline__ void RestrictToTiles(int begin, int size) {
    keys.any_lo = max(keys.any_lo, begin * kKeys);
    keys.any_hi = min(keys.any_hi, (begin + size) * kKeys);
  }
};

// This CTA's q tile, constructed from these arguments. If accumulators need the registers, it is in shared memory, and
// threads read its fields on demand. With enough registers, shared memory would be 3% slower.
template <typename... From>
__device__ __forceinline__ decltype(auto) TileHere(const Params& p, const From&... from) {
  if constexpr (kWarpRows == 32 && kVDim > 64) {
    __shared__ QTile tile;
    if (threadIdx.x == 0) tile = QTile(p, from...);
    __syncthreads();
    return static_cast<const QTile&>(tile);
  } else {
    return QTile(p, from...);
  }
}

using KTile = SharedTile<kKeys, kQKDim>;
using VTile = SharedTile<kKeys, kVDim>;
// Their tangents, if they have any.
template <bool kPresent>
struct KeyTangents {
  KTile k_tangent[kStages];
};
template <bool kPresent>
struct ValueTangents {
  VTile v_tangent[kStages];
};
template <>
struct KeyTangents<false> {
  static constexpr KTile* k_tangent = nullptr;
};
template <>
struct ValueTangents<false> {
  static constexpr VTile* v_tangent = nullptr;
};
struct KVTiles : KeyTangents<kKeyMoves>, ValueTangents<kValueMoves> {
  KTile k[kStages];
  VTile v[kStages];
};

// Visits the kv tiles that the q tile sees, from right to left.
template <bool kFromList>
struct KVRange {
  int column, left;  // the tile's first key; the number of tiles left, including this one

  __device__ __forceinline__ explicit KVRange(const QTile& tile) {
    const int end = (tile.keys.any_hi + kKeys - 1) / kKeys;
    column = (end - 1) * kKeys;
    left = tile.keys.any_lo < tile.keys.any_hi ? end - tile.keys.any_lo / kKeys : 0;
  }
  __device__ __forceinline__ bool Exists() const { return left > 0; }
  __device__ __forceinline__ int Column() const { return column; }
  __device__ __forceinline__ void Next() { column -= kKeys, --left; }
};

template <>
struct KVRange<true> : ListedKeys<kKeys> {
  const Visible& keys;

  __device__ __forceinline__ explicit KVRange(const QTile& tile)
      : ListedTiles(tile.blocks, tile.keys), keys(tile.keys) {}
  __device__ __forceinline__ bool Exists() const { return at >= 0; }
  __device__ __forceinline__ int Column() const { return at; }
  __device__ __forceinline__ void Next() { ListedTiles::Next(keys); }
};

// The index of key j among the keys of all pages. Invalid page numbers are clamped.
__device__ __forceinline__ int PagedKey(const Params& p, int batch, int j) {
  j = min(j, p.kv_len - 1);
  const int page = __ldg(p.page_table + int64_t(batch) * (p.kv_len / kPage) + j / kPage);
  return min(max(page, 0), p.pages - 1) * kPage + j % kPage;
}

// Starts to load the next tiles of K and V, or one of `parts` of them. After the last tile it writes zeros.
struct LoadNext {
  const Params& p;
  const QTile& tile;
  KVTiles& shared;
  KVRange<kListed> next;
  int stage;  // the tile in shared memory that is loaded

  __device__ __forceinline__ void operator()(int part = 0, int parts = 1) const {
    const Matrix K = tile.Key(p, p.key, kQKDim), V = tile.Key(p, p.value, kVDim);
    const int from = next.Exists() ? next.Column() : 0, end = next.Exists() ? tile.keys.any_hi : 0;
    if constexpr (kPage > 0) {
      const auto key = [&](int j) { return PagedKey(p, tile.batch, j); };
      shared.k[stage].template LoadRows<kThreads>([&](int j) { return K.At(key(j), 0); }, from, end, part, parts);
      shared.v[stage].template LoadRows<kThreads>([&](int j) { return V.At(key(j), 0); }, from, end, part, parts);
    } else {
      shared.k[stage].template Load<kThreads>(K.data, K.stride, from, end, part, parts);
      shared.v[stage].template Load<kThreads>(V.data, V.stride, from, end, part, parts);
    }
    if constexpr (kKeyMoves) {
      const Matrix moved = tile.Key(p, static_cast<const TangentParams&>(p).key_tangent, kQKDim);
      shared.k_tangent[stage].template Load<kThreads>(moved.data, moved.stride, from, end, part, parts);
    }
    if constexpr (kValueMoves) {
      const Matrix moved = tile.Key(p, static_cast<const TangentParams&>(p).value_tangent, kVDim);
      shared.v_tangent[stage].template Load<kThreads>(moved.data, moved.stride, from, end, part, parts);
    }
  }
  // Called after all loads of these tiles are issued.
  __device__ __forceinline__ void Commit() {
    CpAsyncCommit();
    next.Next();
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
};

// Calls step(k, v, column, load_next) for the kv tiles that the q tile sees. It goes from right to left, so tiles that
// need masks come first. In every thread, a step must call load_next once for each part. Before the loop, `load`
// starts the loads that stay, `landed` runs after the thread's own loads have arrived, and `loaded` after all have. The
// threads have synchronised when it returns.
template <typename Load, typename Landed, typename Loaded, typename Step>
__device__ __forceinline__ void LoopOverKV(const Params& p, const QTile& tile, KVTiles& shared, Load load,
                                           Landed landed, Loaded loaded, Step step) {
  KVRange<kListed> at(tile);
  LoadNext load_next = {p, tile, shared, at, 0};
  load();
  CpAsyncCommit();
  while (load_next.stage < kStages - 1) {
    load_next();
    load_next.Commit();
  }
  CpAsyncWait<kStages - 1>();
  landed();
  __syncthreads();
  loaded();
  for (int stage = 0; at.Exists(); at.Next()) {
    CpAsyncWait<kStages - 2>();
    shared.k[stage].template Landed<kThreads>();
    shared.v[stage].template Landed<kThreads>();
    if constexpr (kKeyMoves) shared.k_tangent[stage].template Landed<kThreads>();
    if constexpr (kValueMoves) shared.v_tangent[stage].template Landed<kThreads>();
    __syncthreads();  // waits for the tile, and until all warps are done with the previous one
    step(shared.k[stage], shared.v[stage], at.Column(), load_next);
    load_next.Commit();
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  CpAsyncWait<0>();  // a CTA must not exit before its loads complete
  __syncthreads();
}

// Starts to load the rows of Q, or of the packed heads, into shared memory.
__device__ __forceinline__ void LoadQ(const Params& p, const QTile& tile, SharedTile<kRows, kQKDim>& shared) {
  const Matrix Q = tile.Query(p, p.query, kQKDim);
  if constexpr (kPacked == 1) {
    shared.template Load<kThreads>(Q.data, Q.stride, tile.row, p.q_len);
  } else {
    shared.template LoadRows<kThreads>([&](int row) { return Q.At(row / kPacked, row % kPacked * kQKDim); }, tile.row,
                                       RowsOfHead(p));
  }
}

// Forward: returns the factor diag(l)^-1 of row LaneRow() + 8 h of O, after softmax.Finish(h). One lane of each row
// `writes` l and m.
__device__ __forceinline__ float FinishRow(const Params& p, const QTile& tile, const OnlineSoftmax<kLaneRows>& softmax,
                                           int h, bool writes) {
  const float l = kParts ? softmax.l[h] : softmax.Denominator(p, tile.batch, tile.head, h);
  const float factor = softmax.l[h] == 0.0f ? 0.0f : ZScale(p) / l;
  if (writes && tile.LaneRow() + 8 * h < RowsOfHead(p)) {
    if constexpr (kParts) {
      p.l_parts[tile.Statistic(p, h)] = softmax.RowSum(h);
      p.m_parts[tile.Statistic(p, h)] = softmax.m[h];
    } else {
      p.l[tile.Statistic(p, h)] = softmax.RowSum(h);
      p.m[tile.Statistic(p, h)] = softmax.RowMaximum(p, h);
    }
  }
  return factor;
}

// C = diag(x) C, where x[h] is for row LaneRow() + 8 h.
template <int kCount, int kChunks>
__device__ __forceinline__ void ScaleRows(float (&C)[kCount][kChunks][4], const float (&x)[2 * kCount]) {
#pragma unroll
  for (int m = 0; m < kCount; ++m) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) C[m][c][i] *= x[2 * m + i / 2];
    }
  }
}

// Writes a result through shared memory, which must be free.
template <int kDim, int kCount, int kChunks>
__device__ __forceinline__ void Write(const float (&C)[kCount][kChunks][4], SharedTile<kRows, kDim>& shared,
                                      const Matrix& to, int row, int end) {
#pragma unroll
  for (int m = 0; m < kCount; ++m) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) shared.Put(WarpRow() + 16 * m, 8 * c, C[m][c]);
  }
  __syncthreads();
  shared.template Store<kThreads>(to.data, to.stride, row, end);
}

// The same for O and dQ. f32 results bypass shared memory, which has room only for 16-bit elements.
template <int kDim, int kCount, int kChunks>
__device__ __forceinline__ void WriteOutput(const float (&C)[kCount][kChunks][4], SharedTile<kRows, kDim>& shared,
                                            const OutputMatrix& to, int row, int end) {
  if constexpr (kUnrounded) {
#pragma unroll
    for (int h = 0; h < 2 * kCount; ++h) {
      const int r = row + WarpRow() + threadIdx.x % 32 / 4 + 8 * h;
      if (r >= end) continue;
#pragma unroll
      for (int c = 0; c < kDim / 8; ++c) {
        const float* const x = C[h / 2][c] + h % 2 * 2;
        StorePair<4>(to.At(r, 8 * c + threadIdx.x % 4 * 2), x[0], x[1]);
      }
    }
  } else {
    Write(C, shared, to, row, end);
  }
}

}  // namespace jax_flash::ampere
