// Backward kernel for dK and dV of wide heads, for Ampere and later. dK and dV of a kv tile do not fit into the
// registers together, so separate CTAs compute them. Each keeps one tile of K (and of V), and loops over tiles of Q and
// dO in slices (ampere/slices.cuh):
//   dV:  S = Q_i K^T;   P = exp(S - L_i);   dV += P^T dO_i
//   dK:  S = Q_i K^T;   P = exp(S - L_i);   dP = dO_i V^T;   dS = P (dP - D_i);   dK += dS^T Q_i
// P or dS passes through shared memory. ampere/wide_backward_query.cuh computes dQ.
//
// Tiles of S have kRows rows and kKeys columns, both multiples of 16. The host launches
//   jax_flash_backward_prepare   see ampere/backward_prepare.cuh
//   jax_flash_backward           for dK (or the gradients of captured arrays) and for dV, kThreads threads for each kv
//                                tile of each head of K and batch entry
// With block lists, each block of the block mask consists of whole tiles.
#pragma once

#include "ampere/backward_prepare.cuh"
#include "ampere/q_tiles.cuh"
#include "ampere/slices.cuh"
#include "ampere/wide_scores.cuh"

namespace jax_flash::ampere::backward {

constexpr int kRows = kTiling.rows;
constexpr int kKeys = kTiling.cols;
constexpr int kWarps = kTiling.groups;
constexpr int kStages = kTiling.stages;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowWarps = WideRowWarps(kKeys), kColumnWarps = kWarps / kRowWarps;
constexpr int kPartKeys = kKeys / kRowWarps, kPartSlice = kSlice / kColumnWarps;
constexpr bool kDS = kDK || kProblem.captured_gradients;

struct Shared {
  SlicedTile<kKeys, kQKDim> k;
  SlicedTile<kKeys, kVDim> v;
  SharedTile<kRows, kKeys> s;                 // P or dS
  SharedTile<kRows, kSlice> slices[kStages];  // of Q and dO
  Visible rows;                               // the rows that see the kv tile
};

// dK of a kv tile, or dV.
template <bool kOfKey>
struct Gradient {
  static constexpr int kDim = kOfKey ? kQKDim : kVDim, kSlices = kOfKey ? kQKSlices : kVSlices;
  static constexpr int kFirst = kOfKey ? kQKSlices + kVSlices : kQKSlices;  // the first slice of the last product
  static constexpr bool kWanted = kOfKey ? kDK : kDV;

  const Params& p;
  Shared& shared;
  const int column, kv_head, batch;  // of the kv tile
  const BlockList blocks;            // block rows that see it, with a block mask
  const Visible& rows;
  const int part_row, part_column;  // of this warp in dK or dV, and in a slice

  Accumulator<kPartKeys, kPartSlice> sum[kSlices];

  __device__ __forceinline__ Gradient(const Params& p, Shared& shared, int tile, int kv_head, int batch,
                                      const BlockList& blocks)
      : p(p),
        shared(shared),
        column(tile * kKeys),
        kv_head(kv_head),
        batch(batch),
        blocks(blocks),
        rows(shared.rows),
        part_row(threadIdx.x / 32 / kColumnWarps * kPartKeys),
        part_column(threadIdx.x / 32 % kColumnWarps * kPartSlice) {
#pragma unroll
    for (int n = 0; n < kSlices; ++n) Clear(sum[n]);
    if (threadIdx.x == 0) shared.rows = RowsOf(p, PositionsOf(p, batch), batch, column, column + kKeys);
    __syncthreads();
  }

  // Processes one q tile. Numbers are lines of Algorithm 4.
  template <typename Slices>
  __device__ __forceinline__ void Step(Slices& slices, int head, int row) {
    WideScores<kWarps, kRows, kKeys> scores(p, batch, head, row, column);
#pragma unroll 1
    for (int n = 0; n < kQKSlices; ++n) scores.AddToS(slices.Next(n), SliceOf(shared.k, n));  // 11
    scores.ApplyMasks(row < rows.every_lo || row + kRows > rows.every_hi);                    // 12
    scores.ToP([&](int i, int j, const float (&P)[4]) {                                       // 13 to 15
      if (!kOfKey) shared.s.PutOperand(i, j, P);
    });
    if constexpr (kOfKey) {
#pragma unroll 1
      for (int n = 0; n < kVSlices; ++n) scores.AddToDP(slices.Next(kQKSlices + n), SliceOf(shared.v, n));  // 17
      scores.template ToDS<true>(shared.s);                                                                 // 18, 20
    }
    auto left = LeftOperandOf<kPartKeys / 16, kRows / kStep>(
        [&](int m, int s) { return shared.s.ColumnsAsA(s * kStep, part_row + 16 * m); });
#pragma unroll
    for (int n = 0; n < kSlices; ++n) {
      const auto& right = slices.Next(kFirst + n);  // the first one also waits for P or dS
      if (n == 0) left.Load();
      AddOperandsTimesRows<kRows / kStep>(sum[n], left, right, part_column);  // 16 or 22
    }
  }

  __device__ __forceinline__ void Run() {
    QTiles<kListed, kRows> tiles(p, batch, kv_head, blocks, rows);
    struct Place {
      int head, row;
    };
    const auto take = [&]() -> Place {  // the next q tile, or one without rows
      if (!tiles.Exists()) return {0, -1};
      const Place at = {tiles.head, tiles.row};
      tiles.Next();
      return at;
    };
    if (rows.any_lo < rows.any_hi) {
      Place at = take(), later_at = take();
      const auto load_slice = [&](SharedTile<kRows, kSlice>& to, int n, bool later) {
        n %= kQKSlices + kVSlices;
        const bool of_query = n < kQKSlices;
        const int first = (of_query ? n : n - kQKSlices) * kSlice, dim = of_query ? kQKDim : kVDim;
        const Place from = later ? later_at : at;
        const Matrix matrix(of_query ? p.query : p.d_o, batch, from.head, p.q_len, p.q_heads, dim);
        to.template LoadColumns<kThreads>([&](int i) { return matrix.At(i, first); }, max(from.row, 0),
                                          from.row < 0 ? 0 : rows.any_hi, dim - first,
                                          NonEmptyRows(p, batch, from.head));
      };
      const int kv_length = PositionsOf(p, batch).kv_length;
      const Matrix K(p.key, batch, kv_head, p.kv_len, p.kv_heads, kQKDim);
      const Matrix V(p.value, batch, kv_head, p.kv_len, p.kv_heads, kVDim);
      shared.k.template LoadColumns<kThreads>([&](int j) { return K.At(j, 0); }, column, kv_length, kQKDim);
      if (kOfKey) shared.v.template LoadColumns<kThreads>([&](int j) { return V.At(j, 0); }, column, kv_length, kVDim);
      CpAsyncCommit();
      auto slices = SlicesOf<kFirst + kSlices, kThreads>(shared.slices, load_slice);
      slices.Start();
      shared.k.template Landed<kThreads>();
      if (kOfKey) shared.v.template Landed<kThreads>();
      for (; at.row >= 0; at = later_at, later_at = take()) Step(slices, at.head, at.row);
      CpAsyncWait<0>();  // a CTA must not exit before its loads complete
    }
    if (kWanted) Write();
  }

  // Writes the rows of dK or dV, for keys below S.
  __device__ __forceinline__ void Write() {
    const Matrix matrix(kOfKey ? p.dk : p.dv, batch, kv_head, p.kv_len, p.kv_heads, kDim);
    const float scale = kOfKey ? ScaleOf(p) : ZScale(p);
#pragma unroll
    for (int i = 0; i < kSlices * kPartKeys / 8 * kPartSlice / 8; ++i) {
      const int n = i / (kPartSlice / 8) / (kPartKeys / 8), h = i / (kPartSlice / 8) % (kPartKeys / 8);
      const int c = i % (kPartSlice / 8);
      const int key = column + part_row + 8 * h + LaneRowOfColumns();
      const int d = n * kSlice + part_column + 8 * c + threadIdx.x % 4 * 2;
      const float* const x = sum[n][h / 2][c] + h % 2 * 2;
      if (key < p.kv_len && d < kDim) StorePair<kElementBytes>(matrix.At(key, d), x[0] * scale, x[1] * scale);
    }
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

// CTAs are ordered head by head, so their loads hit L2. The first keys come first; if causal, the most rows see them.
extern "C" __global__ void __launch_bounds__(kThreads, 1) jax_flash_backward(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  constexpr int kGradients = kDS + kDV;
  const bool of_key = kDS && (!kDV || blockIdx.x % 2 == 0);
  const int at = blockIdx.x / kGradients;
  int tile, kv_head, batch;
  BlockList blocks;
  if constexpr (kListed) {
    constexpr int kTiles = kTilesOfColumn<kKeys>;
    int item, list;  // index of a key/value head among the heads of all batch entries
    ListOfItem(at / kTiles, BlockColumns(p), p.batch * p.kv_heads, &item, &list);
    kv_head = item % p.kv_heads, batch = item / p.kv_heads;
    blocks = ColumnList(p, batch, kv_head * (p.q_heads / p.kv_heads), list);
    tile = blocks.index * kTiles + at % kTiles;
  } else {
    const int tiles = (p.kv_len + kKeys - 1) / kKeys;
    tile = at % tiles, kv_head = at / tiles % p.kv_heads, batch = at / tiles / p.kv_heads;
  }
  if (of_key) {
    if constexpr (kDS) Gradient<true>(p, shared, tile, kv_head, batch, blocks).Run();
  } else {
    if constexpr (kDV) Gradient<false>(p, shared, tile, kv_head, batch, blocks).Run();
  }
}

}  // namespace jax_flash::ampere::backward
