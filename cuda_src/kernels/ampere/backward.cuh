// Backward kernel for Ampere and later: Algorithm 4 of the paper. Each CTA keeps one tile of K and V, and loops over
// tiles of Q and dO:
//   S = Q_i K^T;       P = exp(S - L_i)
//   dP = dO_i V^T;     dS = P (dP - D_i)
//   dV += P^T dO_i;    dK += dS^T Q_i;     dQ_i += dS K, over all CTAs, in f32
// All warps share each product. Their parts are as square as possible, because shared memory bandwidth limits the
// speed. P and dS pass through shared memory between products. One kernel before computes L and D, and one after
// converts dQ.
//
// Tiles of S have kRows rows and kKeys columns, both multiples of 16. Shared memory has kStages (1 or 2) tiles of Q and
// of dO. The host launches
//   jax_flash_backward_prepare   see ampere/backward_prepare.cuh
//   jax_flash_backward           kThreads threads for each kv tile of each head of K and batch entry
//   jax_flash_backward_finish    if kDQ: batch * heads * ceil(T / kSumRows) * kQKDim threads, kRowThreads in a CTA
// With block lists, each block of the block mask consists of whole tiles. Partial blocks at the edges have the same
// number of tiles.
#pragma once

#include "ampere/backward_prepare.cuh"
#include "ampere/parts.cuh"
#include "ampere/q_tiles.cuh"
#include "ampere/scores.cuh"
#include "ptx/reduce.cuh"

namespace jax_flash::ampere::backward {

constexpr int kRows = kTiling.rows;
constexpr int kKeys = kTiling.cols;
constexpr int kWarps = kTiling.groups;
constexpr int kStages = kTiling.stages;
constexpr int kThreads = 32 * kWarps;
constexpr bool kDS = kDQ || kDK || kScoreGrad;

// The address of the f32 sums of dQ: [rows of dq_sum / kSumRows][columns / 8], with 16 x 8 elements each.
__device__ __forceinline__ float* SumOfDQ(const Params& p, int64_t head, int row, int column) {
  return p.dq_sum + ((head * PaddedRows(p) + row) / kSumRows * (kQKDim / 8) + column / 8) * 128;
}

struct Shared {
  SharedTile<kKeys, kQKDim> k;
  SharedTile<kKeys, kVDim> v;
  SharedTile<kRows, kQKDim> q[kStages];
  SharedTile<kRows, kVDim> d_o[kStages];
  SharedTile<kRows, kKeys> p, ds;
  Visible rows;  // the rows that see the kv tile
};

struct Backward {
  using ScorePart = PartOf<kWarps, kRows, kKeys>;
  using KPart = PartOf<kWarps, kKeys, kQKDim>;
  using VPart = PartOf<kWarps, kKeys, kVDim>;
  using QPart = PartOf<kWarps, kRows, kQKDim>;

  const Params& p;
  Shared& shared;
  const int column, kv_head, batch;  // of the kv tile
  const BlockList blocks;            // block rows that see it, with a block mask
  const Visible& rows;

  Accumulator<KPart::kHeight, KPart::kWidth> dK;
  Accumulator<VPart::kHeight, VPart::kWidth> dV;

  __device__ __forceinline__ Backward(const Params& p, Shared& shared, int tile, int kv_head, int batch,
                                      const BlockList& blocks)
      : p(p), shared(shared), column(tile * kKeys), kv_head(kv_head), batch(batch), blocks(blocks), rows(shared.rows) {
    if (threadIdx.x == 0) shared.rows = RowsOf(p, PositionsOf(p, batch), batch, column, column + kKeys);
    __syncthreads();
  }

  // Starts to load a tile of Q and dO into `stage`, or one of `parts` of it.
  __device__ __forceinline__ void Load(int stage, int head, int row, int part = 0, int parts = 1) {
    const Matrix Q(p.query, batch, head, p.q_len, p.q_heads, kQKDim);
    const Matrix dO(p.d_o, batch, head, p.q_len, p.q_heads, kVDim);
    const NonEmptyRows wanted(p, batch, head);
    shared.q[stage].template Load<kThreads>(Q.data, Q.stride, row, rows.any_hi, part, parts, wanted);
    shared.d_o[stage].template Load<kThreads>(dO.data, dO.stride, row, rows.any_hi, part, parts, wanted);
  }

  __device__ __forceinline__ void Landed(int stage, bool first) {
    if (first) shared.k.template Landed<kThreads>();
    if (first && kDS) shared.v.template Landed<kThreads>();
    shared.q[stage].template Landed<kThreads>();
    shared.d_o[stage].template Landed<kThreads>();
  }

  // Computes P and dS of a tile. Numbers are lines of Algorithm 4.
  __device__ __forceinline__ void Recompute(int stage, int head, int row) {
    const ScorePart part;
    if (!part.active) return;
    const Scores scores(p, batch, head, row + part.row, column + part.column, KindOfBlock(p, batch, head, row, column));
    float minus_l[ScorePart::kHeight / 16][2], D[ScorePart::kHeight / 16][2];
    scores.RowStatistics(p.logsumexp, minus_l);
    if (kDS) scores.RowStatistics(p.d, D);

    Accumulator<ScorePart::kHeight, ScorePart::kWidth> S, dP;
    Clear(S);
    AddRowsTimesRows(S, shared.q[stage], part.row, shared.k, part.column);  // 11
    SoftCapTanh(p, S);
    if (!scores.block.Full() || row < rows.every_lo || row + kRows > rows.every_hi)
      scores.ApplyMasks(PositionsOf(p, batch), S);  // 12
    if (kDS) {
      Clear(dP);
      AddRowsTimesRows(dP, shared.d_o[stage], part.row, shared.v, part.column);  // 17
    }
    // 13, 14, 15
    Scores::SavedScores<ScorePart::kHeight / 16, ScorePart::kWidth / 8> saved;
    scores.ToP<true>(S, minus_l, saved, [&](int m, int c, const float (&P)[4]) {
      if (kDV) shared.p.PutOperand(part.row + 16 * m, part.column + 8 * c, P);
    });
    if (kDS) {
      scores.ToDS<true, true>(S, D, saved, dP);  // 18, 20
#pragma unroll
      for (int i = 0; i < ScorePart::kHeight / 16 * ScorePart::kWidth / 8; ++i) {
        const int m = i / (ScorePart::kWidth / 8), c = i % (ScorePart::kWidth / 8);
        shared.ds.PutOperand(part.row + 16 * m, part.column + 8 * c, dP[m][c]);
      }
    }
  }

  // Adds dS K to dQ_i (line 21).
  __device__ __forceinline__ void AddDQ(int head, int row) {
    const QPart part;
    if (!part.active) return;
    Accumulator<QPart::kHeight, QPart::kWidth> dQ;
    Clear(dQ);
    AddTileTimesRows(dQ, shared.ds, part.row, shared.k, part.column);
#pragma unroll
    for (int m = 0; m < QPart::kHeight / 16; ++m) {
#pragma unroll
      for (int c = 0; c < QPart::kWidth / 8; ++c) {
        const int from = part.column + 8 * c;
        if (QPart::kWhole || from < kQKDim) {
          AddToGlobal(SumOfDQ(p, int64_t(batch) * p.q_heads + head, row + part.row + 16 * m, from), dQ[m][c]);
        }
      }
    }
  }

  __device__ __forceinline__ void Run() {
    const KPart k_part;
    const VPart v_part;
    const Matrix K(p.key, batch, kv_head, p.kv_len, p.kv_heads, kQKDim);
    const Matrix V(p.value, batch, kv_head, p.kv_len, p.kv_heads, kVDim);
    Clear(dK);
    Clear(dV);
    QTiles<kListed, kRows> tiles(p, batch, kv_head, blocks, rows);
    if (rows.any_lo < rows.any_hi && (!kListed || tiles.Exists())) {
      const int kv_length = PositionsOf(p, batch).kv_length;
      shared.k.template Load<kThreads>(K.data, K.stride, column, kv_length);
      if (kDS) shared.v.template Load<kThreads>(V.data, V.stride, column, kv_length);
      Load(0, tiles.head, tiles.row);
      CpAsyncCommit();
      bool first = true;
      for (int stage = 0; tiles.Exists(); stage = kStages - 1 - stage) {
        const int head = Opaque(tiles.head), row = Opaque(tiles.row);  // Opaque: keeps no copies in registers
        // After the last tile this loads the last tile again, and nobody reads it. A branch would keep the compiler
        // from spreading the loads over the product.
        const auto load_next = [&](int part, int parts) {
          const bool there = tiles.Exists();
          if (kStages == 2) Load(1 - stage, there ? tiles.head : head, there ? tiles.row : row, part, parts);
        };
        CpAsyncWait<0>();
        Landed(stage, first);
        first = false;
        __syncthreads();  // waits for Q_i and dO_i, and until all warps are done with P, dS and the previous tiles
        Recompute(stage, head, row);
        __syncthreads();
        tiles.Next();
        if (kDV && v_part.active) {  // 16
          AddColumnsTimesRows(dV, shared.p, v_part.row, shared.d_o[stage], v_part.column, load_next);
        } else {
          load_next(0, 1);
        }
        // 22
        if (kDK && k_part.active) AddColumnsTimesRows(dK, shared.ds, k_part.row, shared.q[stage], k_part.column);
        if (kStages == 1) {
          __syncthreads();
          if (tiles.Exists()) Load(0, tiles.head, tiles.row);
        }
        CpAsyncCommit();
        if (kDQ) AddDQ(head, row);
      }
      CpAsyncWait<0>();  // a CTA must not exit before its loads complete
    }
    if (kDK && k_part.active) Write(dK, k_part, ScaleOf(p), p.dk, kQKDim);
    if (kDV && v_part.active) Write(dV, v_part, ZScale(p), p.dv, kVDim);
  }

  // Writes the rows of dK or dV, for keys below S.
  template <typename Part, int kCount, int kChunks>
  __device__ __forceinline__ void Write(const float (&C)[kCount][kChunks][4], const Part& part, float scale, void* to,
                                        int dim) {
    const Matrix matrix(to, batch, kv_head, p.kv_len, p.kv_heads, dim);
#pragma unroll
    for (int i = 0; i < kCount * kChunks * 2; ++i) {
      const int m = i / 2 / kChunks, c = i / 2 % kChunks, h = i % 2;
      const int key = column + part.row + 16 * m + 8 * h + LaneRowOfColumns();
      const int d = part.column + 8 * c + threadIdx.x % 4 * 2;
      if (key < p.kv_len && (Part::kWhole || d < dim))
        StorePair<kElementBytes>(matrix.At(key, d), C[m][c][2 * h] * scale, C[m][c][2 * h + 1] * scale);
    }
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

// CTAs are ordered head by head, so their loads hit L2. The first keys come first; if causal, the most rows see them.
extern "C" __global__ void __launch_bounds__(kThreads, 256 / kThreads)
    jax_flash_backward(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if constexpr (kListed) {
    constexpr int kTiles = kTilesOfColumn<kKeys>;
    int item, list;  // index of a key/value head among the heads of all batch entries
    ListOfItem(blockIdx.x / kTiles, BlockColumns(p), p.batch * p.kv_heads, &item, &list);
    const int kv_head = item % p.kv_heads, batch = item / p.kv_heads;
    const BlockList blocks = ColumnList(p, batch, kv_head * (p.q_heads / p.kv_heads), list);
    Backward(p, shared, blocks.index * kTiles + blockIdx.x % kTiles, kv_head, batch, blocks).Run();
  } else {
    const int tiles = (p.kv_len + kKeys - 1) / kKeys;
    Backward(p, shared, blockIdx.x % tiles, blockIdx.x / tiles % p.kv_heads, blockIdx.x / tiles / p.kv_heads,
             BlockList())
        .Run();
  }
}

// Converts dQ to its dtype and layout. Each thread converts 8 columns of two rows.
extern "C" __global__ void jax_flash_backward_finish(const __grid_constant__ Params p) {
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int column = thread % (kQKDim / 8) * 8, quad = thread / (kQKDim / 8) % 8;
  const int64_t tile = thread / kQKDim;  // index of a tile of kSumRows rows
  const int tiles = (p.q_len + kSumRows - 1) / kSumRows, row = tile % tiles * kSumRows, head = tile / tiles % p.q_heads;
  const int64_t batch = tile / tiles / p.q_heads;
  if (batch >= p.batch) return;
  float x[2][8];
  LoadSum(SumOfDQ(p, batch * p.q_heads + head, row, column), quad, x);
  const OutputMatrix dQ(p.dq, batch, head, p.q_len, p.q_heads, kQKDim);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[h][i] *= ScaleOf(p);
    if (row + quad + 8 * h < p.q_len) StoreEight<kOutputBytes>(dQ.At(row + quad + 8 * h, column), x[h]);
  }
}

}  // namespace jax_flash::ampere::backward
