// The backward for Hopper: Algorithm 4 of the paper. A CTA keeps a tile of K and V and walks Q and dO.
//
// One thread of the producer warpgroup loads tiles by TMA. Each consumer warpgroup owns 64 rows of K and V, and of dK
// and dV in registers. It works on the transposes, whose rows are keys, so that P^T and dS^T are left operands straight
// from registers:
//   S^T = K Q_i^T;   P^T = exp(S^T - L_i);   dP^T = V dO_i^T;   dS^T = P^T (dP^T - D_i)
//   dV += P^T dO_i;  dK += dS^T Q_i;         dQ_i += dS K, over all CTAs, in f32
// Only dQ needs the dS of all warpgroups; it goes through shared memory. Of l and m only the logsumexp L = m + log l is
// needed. A kernel before computes L and D and clears dQ, a kernel after converts dQ.
//
// Where a head dim is above 128, dK and dV of 64 keys do not fit into the registers of a warpgroup: there a CTA has 64
// keys, one warpgroup S, P and dV, the other dP, dS and dK.
//
// The host defines what config.cuh reads and JAX_FLASH_ROWS (of a tile of Q: 64 or 128), _COLS (keys of a CTA: 128, or
// 64 if a head dim is above 128), _CONSUMERS (warpgroups: 2) and _STAGES. It launches
//   jax_flash_backward_prepare  a block of 256 threads for each 32 rows of T rounded up to _ROWS, of each head
//   jax_flash_backward          at most one CTA a multiprocessor, of 128 (_CONSUMERS + 1) threads and
//                               `jax_flash_shared_bytes`; boxes of _ROWS rows in the maps of Q and dO, of _COLS in
//                               those of K and V, and of 64 in those of dK and dV (where they are asked for)
//   jax_flash_backward_finish   if dQ is asked for: a block of 256 threads for each 64 rows of T rounded up to _ROWS
#pragma once

#include "common/philox.h"
#include "config.cuh"
#include "params.h"
#include "schedule.cuh"
#include "scores.cuh"
#include "tile/mbarrier.cuh"
#include "tile/reduce.cuh"
#include "tile/tma.cuh"
#include "tile/types.cuh"
#include "tile/warp.cuh"
#include "tile/wgmma.cuh"
#include "visible.cuh"

namespace jax_flash {

constexpr int kRows = JAX_FLASH_ROWS;
constexpr int kConsumers = JAX_FLASH_CONSUMERS;
constexpr int kStages = JAX_FLASH_STAGES;  // tiles of Q, and of dO, in flight
static_assert(kConsumers == 2);

// Where dK and dV of 64 keys do not fit into the registers of a warpgroup, one has S^T, P^T and dV of 64 keys, the
// other dP^T, dS^T and dK.
constexpr bool kWide = kQKDim > 128 || kVDim > 128;
constexpr int kCols = kWide ? 64 : 64 * kConsumers;  // of a tile of S: keys
constexpr int kThreads = kWarpgroup * (kConsumers + 1);
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

__host__ __device__ constexpr int Boxes(int dim) { return (dim + 63) / 64; }
constexpr int kQKBoxes = Boxes(kQKDim), kVBoxes = Boxes(kVDim);
constexpr int kQBox = kRows * 128;   // bytes of a box of Q or dO
constexpr int kKVBox = kCols * 128;  // bytes of a box of K or V
constexpr int kDQBytes = kWide ? 64 * kRows * 4 : kRows * kQKDim * 4;

constexpr bool kDS = kDQ || kDK;  // is dS needed?

// The warpgroups share the work on a tile of dQ: 64 rows each, or all rows and some of the columns. A part that is no
// whole box must not leave its box.
constexpr bool kSplitRows = kRows == 128;
static_assert(kRows == 64 || (kRows == 128 && !kWide));
constexpr int kDQFirst = kSplitRows ? kQKDim : kQKDim > 64 ? 64 : (kQKDim + 8) / 16 * 8;
constexpr int kDQSecond = kSplitRows ? kQKDim : kQKDim - kDQFirst;

// dV += P^T dO can start before dS is known where there are registers for P in both precisions.
constexpr bool kEarlyDV = kRows == 64;
static_assert(kEarlyDV || !kSoftCap);
// S^T can start at -L / scale instead of 0: then nobody waits for L, and the subtraction costs nothing. With 128 rows
// to fetch it costs more than it saves.
constexpr bool kStartAtL = kRows == 64 && !kScores;

__device__ __forceinline__ int QTiles(const Params& p) { return (p.q_len + kRows - 1) / kRows; }

// What exp2 of a difference of scores needs, before and after S became s.
__device__ __forceinline__ float ScoreScale(const Params& p) { return kScores ? 1.0f : p.scale; }

// dS is computed without the factor of the kept entries, which comes with the results. (If nothing is kept, 1 will do.)
__device__ __forceinline__ float KeepScale(const Params& p) {
  return kDropout && p.keep_scale > 0.0f ? p.keep_scale : 1.0f;
}

// L and D are stored in whole tiles, 16 rows lane by lane: one float4 is what a lane needs of a 16 x 16 tile.
__device__ __forceinline__ int Place(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

struct BackwardShared {
  alignas(1024) uint8_t k[kQKBoxes * kKVBox];
  alignas(1024) uint8_t v[kVBoxes * kKVBox];
  alignas(1024) uint8_t q[kStages][kQKBoxes * kQBox];
  alignas(1024) uint8_t d_o[kStages][kVBoxes * kQBox];
  alignas(1024) uint8_t ds[kWide ? 1 : 2][kRows / 64 * kKVBox];  // dS^T, boxes of [keys][64 rows]; at the end dV
  alignas(1024) uint8_t
      dq[kDQBytes > kQKBoxes* kKVBox || kWide ? kDQBytes : kQKBoxes * kKVBox];  // on its way out, in f32; at the end dK
  alignas(16) float minus_l[kStages][kRows];
  alignas(16) float d[kStages][kRows];
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t q_full[kStages], q_empty[kStages];
  uint64_t do_full[kStages], do_empty[kStages];
};
static_assert(kWide || sizeof(BackwardShared::ds) >= sizeof(BackwardShared::v));

// A tile of K and V, and the tiles of Q that see it: first <= i < end of each query head of the group.
struct Tile {
  int column, head, batch, first, end;
  int every_lo, every_hi;  // the rows that surely see all of it
};

// Rows that see nothing have an L that hides them, so `every_hi` is needed only if others end before.
constexpr bool kEnds = kWindow || kSegments || kMask;

__device__ __forceinline__ bool Next(const Params& p, Schedule<kCausal>* schedule, Tile* tile) {
  int head, t;
  if (!schedule->Next(p.batch * p.kv_heads, (p.kv_len + kCols - 1) / kCols, &head, &t)) return false;
  tile->column = t * kCols;
  tile->head = head % p.kv_heads;
  tile->batch = head / p.kv_heads;
  const Positions positions = PositionsOf(p, tile->batch);
  const Visible rows = RowsOf(p, positions, tile->batch, tile->column, tile->column + kCols);
  tile->first = rows.any_lo / kRows;
  tile->end = rows.any_lo < rows.any_hi ? (rows.any_hi + kRows - 1) / kRows : tile->first;
  tile->every_lo = rows.every_lo < rows.every_hi ? rows.every_lo : QTiles(p) * kRows;
  tile->every_hi = rows.every_hi < positions.q_length ? rows.every_hi : QTiles(p) * kRows;
  return true;
}

// The tiles of Q, in the order in which a CTA walks them.
struct Walk {
  int q_tile, head, end_head;
  __device__ __forceinline__ Walk(const Params& p, const Tile& tile)
      : q_tile(tile.first), head(tile.head * (p.q_heads / p.kv_heads)), end_head(head + p.q_heads / p.kv_heads) {
    if (tile.first >= tile.end) head = end_head;
  }
  __device__ __forceinline__ bool Done() const { return head == end_head; }
  __device__ __forceinline__ void Next(const Tile& tile) {
    if (++q_tile == tile.end) q_tile = tile.first, ++head;
  }
  // Among the tiles of all heads.
  __device__ __forceinline__ int64_t Index(const Params& p, const Tile& tile) const {
    return (int64_t(tile.batch) * p.q_heads + head) * QTiles(p) + q_tile;
  }
};

struct Producer {
  const Params& p;
  BackwardShared& shared;
  Ring<kStages> at;
  uint32_t kv_parity = 0;

  __device__ __forceinline__ void Run(const Tile& tile, const TensorMap* q_map, const TensorMap* k_map,
                                      const TensorMap* v_map, const TensorMap* do_map) {
    MbarrierWait(&shared.k_empty, kv_parity ^ 1);
    MbarrierArriveExpectTx(&shared.k_full, sizeof(shared.k));
    for (int b = 0; b < kQKBoxes; ++b)
      TmaLoad(shared.k + b * kKVBox, k_map, &shared.k_full, b * 64, tile.column, tile.head, tile.batch);
    MbarrierWait(&shared.v_empty, kv_parity ^ 1);
    MbarrierArriveExpectTx(&shared.v_full, sizeof(shared.v));
    for (int b = 0; b < kVBoxes; ++b)
      TmaLoad(shared.v + b * kKVBox, v_map, &shared.v_full, b * 64, tile.column, tile.head, tile.batch);
    kv_parity ^= 1;
    for (Walk walk(p, tile); !walk.Done(); at.Next(), walk.Next(tile)) {
      const int row = walk.q_tile * kRows;
      const int64_t statistics = walk.Index(p, tile) * kRows;
      MbarrierWait(&shared.q_empty[at.index], at.parity ^ 1);
      MbarrierArriveExpectTx(&shared.q_full[at.index], sizeof(shared.q[0]) + kRows * 4);
      for (int b = 0; b < kQKBoxes; ++b)
        TmaLoad(shared.q[at.index] + b * kQBox, q_map, &shared.q_full[at.index], b * 64, row, walk.head, tile.batch);
      BulkLoad(shared.minus_l[at.index], p.logsumexp + statistics, kRows * 4, &shared.q_full[at.index]);
      MbarrierWait(&shared.do_empty[at.index], at.parity ^ 1);
      MbarrierArriveExpectTx(&shared.do_full[at.index], sizeof(shared.d_o[0]) + kRows * 4);
      for (int b = 0; b < kVBoxes; ++b)
        TmaLoad(shared.d_o[at.index] + b * kQBox, do_map, &shared.do_full[at.index], b * 64, row, walk.head,
                tile.batch);
      BulkLoad(shared.d[at.index], p.d + statistics, kRows * 4, &shared.do_full[at.index]);
    }
  }
};

// The 64 keys of a consumer warpgroup: S^T and dP^T. A lane holds two of the keys: `key` and key + 8.
struct Keys {
  const Params& p;
  BackwardShared& shared;
  const int warpgroup, warp, lane, first_key;
  const float scale_log2;
  uint32_t kv_parity = 0;
  Ring<kStages> at;  // the tile of Q and dO

  float S[kRows / 2], dP[kRows / 2];  // transposed; S becomes P, dP becomes dS
  uint32_t P[kRows / 4], dS[kRows / 4];

  __device__ __forceinline__ Keys(const Params& p, BackwardShared& shared)
      : p(p),
        shared(shared),
        warpgroup(Uniform(threadIdx.x / kWarpgroup) - 1),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        first_key(kWide ? 0 : 64 * warpgroup),
        scale_log2(ScoreScale(p) * kLog2e) {}

  template <int kCount>
  __device__ __forceinline__ void Clear(float (&C)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) C[i] = 0.0f;
  }

  __device__ __forceinline__ void Release(uint64_t* barrier) { MbarrierArrive(barrier, lane == 0); }
  __device__ __forceinline__ void SyncConsumers() { BarrierSync(1, kConsumers * kWarpgroup); }
  static constexpr int kPFull = 4, kDSFull = 5;  // named barriers
  __device__ __forceinline__ void SyncWarpgroup() { BarrierSync(2 + warpgroup, kWarpgroup); }

  // C = A B^T, or += : A this warpgroup's 64 rows of K or V, B a tile of Q or dO.
  template <int kDim>
  __device__ __forceinline__ void IssueKeysTimesRows(float (&C)[kRows / 2], const uint8_t* keys, const uint8_t* rows,
                                                     bool accumulate) {
    const uint64_t a = Descriptor(keys + first_key * 128, 0), b = Descriptor(rows, 0);
    WgmmaFence();
#pragma unroll
    for (int d = 0; d < (kDim + 15) / 16; ++d) {
      Wgmma<kRows>::template SS<Major::kK, Major::kK>(C, Advance(a, d / 4 * kKVBox + d % 4 * 32),
                                                      Advance(b, d / 4 * kQBox + d % 4 * 32), accumulate || d > 0);
    }
    WgmmaCommit();
  }

  // C += A B: A = P^T or dS^T, B a tile of dO or Q.
  template <int kDim>
  __device__ __forceinline__ void IssueGradient(float (&C)[kDim / 2], const uint32_t (&A)[kRows / 4],
                                                const uint8_t* rows) {
    const uint64_t b = Descriptor(rows, kQBox);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      Wgmma<kDim>::template RS<Major::kMN>(C, A + 4 * i, Advance(b, i * 16 * 128), true);
    WgmmaCommit();
  }

  // kWidth columns of 64 rows of dQ, from `column` on. `row_block`: of 64 rows, among those of all heads.
  template <int kWidth>
  struct DQ {
    float C[kWidth > 0 ? kWidth / 2 : 1];
  };

  // dQ = dS K
  template <int kWidth>
  __device__ __forceinline__ void Issue(DQ<kWidth>& dQ, const uint8_t* ds, int column) {
    if constexpr (kWidth > 0) {
      const uint64_t a = Descriptor(ds, 0);
      const uint64_t b = Descriptor(shared.k + column / 64 * kKVBox + column % 64 * 2, kKVBox);
      WgmmaFence();
#pragma unroll
      for (int j = 0; j < kCols / 16; ++j) {
        Wgmma<kWidth>::template SS<Major::kMN, Major::kMN>(dQ.C, Advance(a, j * 16 * 128), Advance(b, j * 16 * 128),
                                                           j > 0);
      }
      WgmmaCommit();
    }
  }

  // dQ in HBM += dQ
  template <int kWidth>
  __device__ __forceinline__ void Add(const DQ<kWidth>& dQ, int64_t row_block, int column) {
    if (kWidth == 0) return;
    float* to = p.dq_sum + (row_block * 4 + warp) * 16 * kQKDim + 16 * column;
    if (kWide) {
#pragma unroll
      for (int r = 0; r < kWidth / 8; ++r) {
        AddToGlobal(to + r * 128, {dQ.C[4 * r], dQ.C[4 * r + 1], dQ.C[4 * r + 2], dQ.C[4 * r + 3]});
      }
      return;
    }
    float* staged =
        reinterpret_cast<float*>(shared.dq) + (row_block % (kRows / 64) * 4 + warp) * 16 * kQKDim + 16 * column;
    TmaWaitRead<0>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kWidth / 8; ++r) {
      reinterpret_cast<float4*>(staged)[r * 32 + lane] =
          make_float4(dQ.C[4 * r], dQ.C[4 * r + 1], dQ.C[4 * r + 2], dQ.C[4 * r + 3]);
    }
    FenceProxyAsync();
    __syncwarp();
    BulkReduceAdd(lane == 0, to, staged, 16 * kWidth * 4);
    TmaCommit();
  }

  // S^T = -L / scale
  __device__ __forceinline__ void StartS(int stage) {
    const float4* memory = reinterpret_cast<const float4*>(shared.minus_l[stage]) + lane % 4;
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      const float4 x = memory[4 * c];
      const float minus_l[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) S[8 * c + i] = minus_l[i / 4 * 2 + i % 2];
    }
    Pin(S);
  }

  __device__ __forceinline__ int Key(const Tile& tile) const { return tile.column + first_key + 16 * warp + lane / 4; }

  // S^T becomes s^T: scale, soft cap, bias. The derivative of the soft cap is left in dS.
  __device__ __forceinline__ void Score(const Tile& tile, int row0, int head) {
    const Entries entries(p, tile.batch, head);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const int row = row0 + lane % 4 * 2 + i / 4 * 8 + i % 2, key = Key(tile) + i / 2 % 2 * 8;
      S[i] = Cap(p, S[i]);
      if (kSoftCap && i % 2 == 1) dS[i / 2] = Pack(CapDerivative(p, S[i - 1]), CapDerivative(p, S[i]));
      // Entries outside are hidden later.
      if (kBias && i % 2 == 1) S[i - 1] += entries.Bias(min(row - 1, p.q_len - 1), min(key, p.kv_len - 1));
      if (kBias && i % 2 == 1) S[i] += entries.Bias(min(row, p.q_len - 1), min(key, p.kv_len - 1));
    }
  }

  // Entries that may not attend become -inf.
  __device__ __forceinline__ void Hide(const Tile& tile, int row0, int head) {
    const Positions positions = PositionsOf(p, tile.batch);
    const Entries entries(p, tile.batch, head);
    const int row = row0 + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = Key(tile) + 8 * h;
      const RowRange rows = AnyKeyRows(positions, key, key + 1);
      const int first = rows.lo < rows.hi ? min(rows.lo - row, int64_t(kRows)) : kRows, end = rows.hi - row;
#pragma unroll
      for (int i = 2 * h; i < kRows / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int r = i / 4 * 8 + e;
          const bool outside = r < first || (kEnds && r >= end);
          if (outside || ((kSegments || kMask) && entries.Hidden(row + r, key))) S[i + e] = -Infinity();
        }
      }
    }
  }

  // S^T is masked and becomes P^T.
  __device__ __forceinline__ void Softmax(const Tile& tile, int row0, int head) {
    if (kScores) Score(tile, row0, head);
    if (row0 < tile.every_lo || (kEnds && row0 + kRows > tile.every_hi)) Hide(tile, row0, head);
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      const float4 x =
          kStartAtL ? float4() : (reinterpret_cast<const float4*>(shared.minus_l[at.index]) + lane % 4)[4 * c];
      const float minus_l[4] = {x.x * scale_log2, x.y * scale_log2, x.z * scale_log2, x.w * scale_log2};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        S[8 * c + i] =
            Exp2(kStartAtL ? S[8 * c + i] * scale_log2 : fmaf(S[8 * c + i], scale_log2, minus_l[i / 4 * 2 + i % 2]));
      }
    }
    if (kDropout) Drop(tile, row0, head);
  }

  // Marks the dropped entries of P^T by their sign.
  __device__ __forceinline__ void Drop(const Tile& tile, int row0, int head) {
    const uint32_t seed0 = p.seed[2 * tile.batch], seed1 = p.seed[2 * tile.batch + 1];
    const uint32_t last_dropped = (p.drop_threshold << 16) - 1;  // among words whose high half is an entry's
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      // The words of the forward's lane of this 16 x 16 tile; transposed they are this lane's.
      const Philox4 counter = {{uint32_t((tile.column / 16 + first_key / 16 + warp) * 4 + lane % 4),
                                uint32_t((row0 / 16 + c) * 8 + lane / 4), p.head_id[head], p.batch_id[tile.batch]}};
      const Philox4 random = Philox(counter, seed0, seed1);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t x = Movmatrix(random.x[w]);
        float* s = S + 8 * c + w / 2 * 4 + w % 2 * 2;
        if (x << 16 <= last_dropped) s[0] = -s[0];
        if (x <= last_dropped) s[1] = -s[1];
      }
    }
  }

  __device__ __forceinline__ static uint32_t PackP(float low, float high) {
    return kDropout ? PackRelu(low, high) : Pack(low, high);
  }

  // dP^T becomes dS^T, in both precisions.
  __device__ __forceinline__ void ComputeDS() {
    const float4* memory = reinterpret_cast<const float4*>(shared.d[at.index]) + lane % 4;
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      const float4 x = memory[4 * c];
      const float D[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 8 * c; i < 8 * c + 8; ++i) {
        const float d = D[i / 4 % 2 * 2 + i % 2];
        dP[i] = kDropout ? fmaf(fmaxf(S[i], 0.0f), dP[i], -fabsf(S[i]) * d) : S[i] * (dP[i] - d);
        if (i % 2 == 1) {
          dS[i / 2] = Pack(dP[i - 1], dP[i]);
          if (!kEarlyDV) P[i / 2] = PackP(S[i - 1], S[i]);
        }
      }
    }
  }

  // A tile of [keys][64 columns] boxes in shared memory from the fragments of this warp's 16 keys.
  __device__ __forceinline__ void Store(uint8_t* to, int c, uint32_t a, uint32_t b, uint32_t x, uint32_t y) {
    const int chunk = (c % 4 * 2 + lane / 16) ^ lane % 8;
    Stmatrix(to + c / 4 * kKVBox + (first_key + 16 * warp + lane % 16) * 128 + chunk * 16, a, b, x, y);
  }

  // This warpgroup's part of dK or dV goes to HBM by way of `to`.
  template <int kDim>
  __device__ __forceinline__ void Leave(const float (&C)[kDim / 2], float scale, uint8_t* to, const Tile& tile,
                                        const TensorMap* map) {
#pragma unroll
    for (int c = 0; c < kDim / 8; c += 2) {
      const float* x = C + 4 * c;
      const bool whole = c + 1 < kDim / 8;  // or what comes after is outside
      Store(to, c / 2, Pack(x[0] * scale, x[1] * scale), Pack(x[2] * scale, x[3] * scale),
            whole ? Pack(x[4] * scale, x[5] * scale) : 0, whole ? Pack(x[6] * scale, x[7] * scale) : 0);
    }
    FenceProxyAsync();
    SyncWarpgroup();
    if (threadIdx.x % kWarpgroup == 0) {
      for (int b = 0; b < Boxes(kDim); ++b)
        TmaStore(map, to + b * kKVBox + first_key * 128, b * 64, tile.column + first_key, tile.head, tile.batch);
      TmaCommit();
    }
  }

  __device__ __forceinline__ void ReleaseKV() {
    TmaWaitRead<0>();
    __syncwarp();
    Release(&shared.k_empty);
    Release(&shared.v_empty);
  }
};

// A warpgroup with S, dP, dK and dV of its 64 keys.
struct Consumer : Keys {
  int buffer = 0;  // of dS
  float dK[kQKDim / 2], dV[kVDim / 2];

  using Keys::Keys;

  __device__ __forceinline__ void Step(const Tile& tile, const Walk& walk, bool last) {
    const int row0 = walk.q_tile * kRows;
    MbarrierWait(&shared.q_full[at.index], at.parity);
    if (kStartAtL) StartS(at.index);
    IssueKeysTimesRows<kQKDim>(S, shared.k, shared.q[at.index], kStartAtL);
    MbarrierWait(&shared.do_full[at.index], at.parity);
    if (kDS) IssueKeysTimesRows<kVDim>(dP, shared.v, shared.d_o[at.index], false);
    WgmmaWait<kDS ? 1 : 0>();
    Pin(S);
    Softmax(tile, row0, walk.head);
    if (kEarlyDV) {
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        P[i] = PackP(S[2 * i], S[2 * i + 1]);
        if (kSoftCap) {
          const float2 derivative = Unpack(dS[i]);
          S[2 * i] *= derivative.x, S[2 * i + 1] *= derivative.y;
        }
      }
      if (kDV) IssueGradient<kVDim>(dV, P, shared.d_o[at.index]);
    }
    WgmmaWait<kEarlyDV && kDV ? 1 : 0>();
    Pin(dP);
    if (last) Release(&shared.v_empty);
    ComputeDS();
    if (kDV && !kEarlyDV) IssueGradient<kVDim>(dV, P, shared.d_o[at.index]);
    if (kDQ) {
#pragma unroll
      for (int c = 0; c < kRows / 16; ++c)
        Store(shared.ds[buffer], c, dS[4 * c], dS[4 * c + 1], dS[4 * c + 2], dS[4 * c + 3]);
      FenceProxyAsync();
      SyncConsumers();
    }
    const int64_t row_block = walk.Index(p, tile) * (kRows / 64);
    if (kSplitRows) {
      Finish<kDQFirst>(shared.ds[buffer] + warpgroup * kKVBox, row_block + warpgroup, 0, last);
    } else if (kDQFirst == kDQSecond || warpgroup == 0) {
      Finish<kDQFirst>(shared.ds[buffer], row_block, warpgroup * kDQFirst, last);
    } else {
      Finish<kDQSecond>(shared.ds[buffer], row_block, kDQFirst, last);
    }
    at.Next();
    buffer ^= 1;
  }

  // dQ and dK from dS.
  template <int kWidth>
  __device__ __forceinline__ void Finish(const uint8_t* ds, int64_t row_block, int column, bool last) {
    DQ<kWidth> dQ;
    if (kDQ) Issue(dQ, ds, column);
    if (kDK) IssueGradient<kQKDim>(dK, dS, shared.q[at.index]);
    WgmmaWait<(kDQ && kDK && kWidth > 0) ? 1 : 0>();
    Pin(dV);
    Pin(dQ.C);
    Release(&shared.do_empty[at.index]);
    if (last) Release(&shared.k_empty);
    if (kDQ) Add(dQ, row_block, column);
    WgmmaWait<0>();
    Pin(dK);
    Release(&shared.q_empty[at.index]);
  }

  __device__ __forceinline__ void Run(const Tile& tile, const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dK);
    Clear(dV);
    MbarrierWait(&shared.k_full, kv_parity);
    MbarrierWait(&shared.v_full, kv_parity);
    kv_parity ^= 1;
    TmaWaitRead<0>();  // the gradients before have left
    SyncConsumers();
    Walk walk(p, tile);
    if (walk.Done()) {
      Release(&shared.k_empty);
      Release(&shared.v_empty);
    }
    while (!walk.Done()) {
      const Walk here = walk;
      walk.Next(tile);
      Step(tile, here, walk.Done());
    }
    TmaWaitRead<0>();
    SyncConsumers();  // the last dQ has read all of dS, and left
    if (kDV) Leave<kVDim>(dV, kDropout ? p.keep_scale : 1.0f, shared.ds[0], tile, dv_map);
    if (kDK) Leave<kQKDim>(dK, KeepScale(p) * p.scale, shared.dq, tile, dk_map);
  }
};

// Wide heads: S, P and dV of 64 keys, and some columns of dQ.
struct ConsumerOfP : Keys {
  float dV[kVDim / 2];

  using Keys::Keys;

  __device__ __forceinline__ void Run(const Tile& tile, const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dV);
    MbarrierWait(&shared.k_full, kv_parity);
    MbarrierWait(&shared.v_full, kv_parity);
    kv_parity ^= 1;
    Walk walk(p, tile);
    if (!walk.Done()) Steps(tile, walk);
    SyncConsumers();  // nobody reads V any more
    if (kDV) Leave<kVDim>(dV, kDropout ? p.keep_scale : 1.0f, shared.v, tile, dv_map);
    ReleaseKV();
  }

  __device__ __forceinline__ void Steps(const Tile& tile, Walk walk) {
    MbarrierWait(&shared.q_full[at.index], at.parity);
    if (kStartAtL) StartS(at.index);
    IssueKeysTimesRows<kQKDim>(S, shared.k, shared.q[at.index], kStartAtL);
    while (!walk.Done()) {
      const Walk here = walk;
      walk.Next(tile);
      WgmmaWait<0>();
      Pin(S);
      Softmax(tile, here.q_tile * kRows, here.head);
      Release(&shared.q_empty[at.index]);
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        P[i] = PackP(S[2 * i], S[2 * i + 1]);
        if (kSoftCap) {
          const float2 derivative = Unpack(dS[i]);
          S[2 * i] *= derivative.x, S[2 * i + 1] *= derivative.y;
        }
      }
      if (kDS) {
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) {
          reinterpret_cast<float4*>(shared.dq)[i * kWarpgroup + 32 * warp + lane] =
              make_float4(S[4 * i], S[4 * i + 1], S[4 * i + 2], S[4 * i + 3]);
        }
        BarrierArrive(kPFull, 2 * kWarpgroup);
      }
      MbarrierWait(&shared.do_full[at.index], at.parity);
      if (kDV) IssueGradient<kVDim>(dV, P, shared.d_o[at.index]);
      Ring<kStages> next = at;
      next.Next();
      const bool last = walk.Done();
      if (!last) {
        MbarrierWait(&shared.q_full[next.index], next.parity);
        if (kStartAtL) StartS(next.index);
        IssueKeysTimesRows<kQKDim>(S, shared.k, shared.q[next.index], kStartAtL);
      }
      if (kDS) BarrierSync(kDSFull, 2 * kWarpgroup);
      if (last) {
        WgmmaWait<0>();
      } else {
        WgmmaWait<1>();
      }
      Pin(dV);
      Release(&shared.do_empty[at.index]);
      at = next;
      if (kDQ) {
        DQ<kDQFirst> dQ;
        Issue(dQ, shared.ds[0], 0);
        WgmmaWait<0>();
        Pin(dQ.C);
        Add(dQ, here.Index(p, tile), 0);
      }
    }
  }
};

// Wide heads: dP, dS and dK of 64 keys, and the other columns of dQ.
struct ConsumerOfDS : Keys {
  static constexpr int kDQMiddle = kDQSecond < 128 ? kDQSecond : 128, kDQLast = kDQSecond - kDQMiddle;
  float dK[kQKDim / 2];

  using Keys::Keys;

  __device__ __forceinline__ void Run(const Tile& tile, const TensorMap* dk_map, const TensorMap* dv_map) {
    Clear(dK);
    MbarrierWait(&shared.k_full, kv_parity);
    MbarrierWait(&shared.v_full, kv_parity);
    kv_parity ^= 1;
    for (Walk walk(p, tile); !walk.Done(); walk.Next(tile)) {
      MbarrierWait(&shared.q_full[at.index], at.parity);
      MbarrierWait(&shared.do_full[at.index], at.parity);
      if (kDS) {
        IssueKeysTimesRows<kVDim>(dP, shared.v, shared.d_o[at.index], false);
        BarrierSync(kPFull, 2 * kWarpgroup);
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) {
          const float4 x = reinterpret_cast<const float4*>(shared.dq)[i * kWarpgroup + 32 * warp + lane];
          S[4 * i] = x.x, S[4 * i + 1] = x.y, S[4 * i + 2] = x.z, S[4 * i + 3] = x.w;
        }
        WgmmaWait<0>();
        Pin(dP);
        ComputeDS();
#pragma unroll
        for (int c = 0; kDQ && c < kRows / 16; ++c)
          Store(shared.ds[0], c, dS[4 * c], dS[4 * c + 1], dS[4 * c + 2], dS[4 * c + 3]);
        FenceProxyAsync();
        BarrierArrive(kDSFull, 2 * kWarpgroup);
        SyncWarpgroup();
      }
      Release(&shared.do_empty[at.index]);
      DQ<kDQMiddle> dQ;
      if (kDQ) Issue(dQ, shared.ds[0], kDQFirst);
      if (kDK) IssueGradient<kQKDim>(dK, dS, shared.q[at.index]);
      if (kDQ) {
        WgmmaWait<(kDK && kDQMiddle > 0) ? 1 : 0>();
        Pin(dQ.C);
        Add(dQ, walk.Index(p, tile), kDQFirst);
        DQ<kDQLast> rest;
        Issue(rest, shared.ds[0], kDQFirst + kDQMiddle);
        WgmmaWait<0>();
        Pin(rest.C);
        Add(rest, walk.Index(p, tile), kDQFirst + kDQMiddle);
      }
      WgmmaWait<0>();
      Pin(dK);
      Release(&shared.q_empty[at.index]);
      at.Next();
    }
    SyncConsumers();  // nobody reads K any more
    if (kDK) Leave<kQKDim>(dK, KeepScale(p) * p.scale, shared.k, tile, dk_map);
    ReleaseKV();
  }
};

// A consumer warpgroup's way through all tiles.
template <typename Consumer>
__device__ __forceinline__ void Consume(const Params& p, BackwardShared& shared, const TensorMap* dk_map,
                                        const TensorMap* dv_map) {
  SetMaxRegistersUp<kConsumerRegisters>();
  Consumer consumer(p, shared);
  Schedule<kCausal> schedule;
  Tile tile;
  while (Next(p, &schedule, &tile)) {
    tile.column = Uniform(tile.column);  // the compiler cannot tell
    tile.first = Uniform(tile.first), tile.end = Uniform(tile.end);
    tile.every_lo = Uniform(tile.every_lo), tile.every_hi = Uniform(tile.every_hi);
    consumer.Run(tile, dk_map, dv_map);
  }
}

}  // namespace jax_flash

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(jax_flash::BackwardShared);

extern "C" __global__ void __launch_bounds__(jax_flash::kThreads, 1)
    jax_flash_backward(const __grid_constant__ jax_flash::Params p, const __grid_constant__ jax_flash::TensorMap q_map,
                       const __grid_constant__ jax_flash::TensorMap k_map,
                       const __grid_constant__ jax_flash::TensorMap v_map,
                       const __grid_constant__ jax_flash::TensorMap do_map,
                       const __grid_constant__ jax_flash::TensorMap dk_map,
                       const __grid_constant__ jax_flash::TensorMap dv_map) {
  using namespace jax_flash;
  extern __shared__ __align__(1024) uint8_t memory[];
  BackwardShared& shared = *reinterpret_cast<BackwardShared*>(memory);
  if (threadIdx.x == 0) {
    MbarrierInit(&shared.k_full, 1), MbarrierInit(&shared.k_empty, 4 * kConsumers);
    MbarrierInit(&shared.v_full, 1), MbarrierInit(&shared.v_empty, 4 * kConsumers);
    for (int s = 0; s < kStages; ++s) {
      MbarrierInit(&shared.q_full[s], 1), MbarrierInit(&shared.q_empty[s], 4 * kConsumers);
      MbarrierInit(&shared.do_full[s], 1), MbarrierInit(&shared.do_empty[s], 4 * kConsumers);
    }
    FenceMbarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    SetMaxRegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      Schedule<kCausal> schedule;
      Tile tile;
      Producer producer{p, shared};
      while (Next(p, &schedule, &tile)) producer.Run(tile, &q_map, &k_map, &v_map, &do_map);
    }
  } else if constexpr (!kWide) {
    Consume<Consumer>(p, shared, &dk_map, &dv_map);
  } else if (threadIdx.x < 2 * kWarpgroup) {
    Consume<ConsumerOfP>(p, shared, &dk_map, &dv_map);
  } else {
    Consume<ConsumerOfDS>(p, shared, &dk_map, &dv_map);
  }
}

// D = rowsum(dO O) - dlogsumexp, -L / scale, and zeros for dQ. A thread takes 8 elements of a row.
extern "C" __global__ void __launch_bounds__(256)
    jax_flash_backward_prepare(const __grid_constant__ jax_flash::Params p) {
  using namespace jax_flash;
  constexpr int kChunks = kVDim / 8;
  constexpr int kLanes = kChunks > 16 ? 32 : kChunks > 8 ? 16 : 8;  // to a row
  const int lane = threadIdx.x % kLanes, padded = QTiles(p) * kRows;
#pragma unroll
  for (int r = threadIdx.x / kLanes; r < 32; r += 256 / kLanes) {
    const int64_t at = int64_t(blockIdx.x) * 32 + r;  // [batch, head, row]
    const int row = at % padded, head = at / padded % p.q_heads;
    const int64_t batch = at / padded / p.q_heads;
    float sum = 0.0f;
    if (row < p.q_len && lane < kChunks) {
      const int64_t from = ((batch * p.q_len + row) * p.q_heads + head) * kChunks + lane;
      const uint4 x = static_cast<const uint4*>(p.o)[from], y = static_cast<const uint4*>(p.d_o)[from];
      const auto dot = [](uint32_t packed_a, uint32_t packed_b) {
        const float2 a = Unpack(packed_a), b = Unpack(packed_b);
        return a.x * b.x + a.y * b.y;
      };
      sum = dot(x.x, y.x) + dot(x.y, y.y) + dot(x.z, y.z) + dot(x.w, y.w);
    }
#pragma unroll
    for (int s = kLanes / 2; s > 0; s /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, s);
    if (lane == 0) {
      const int64_t from = (batch * p.q_heads + head) * p.q_len + row, to = at - row + Place(row);
      const float l = row < p.q_len ? p.l[from] : 0.0f;
      p.logsumexp[to] = l == 0.0f ? -Infinity() : -(p.m[from] + logf(l)) / ScoreScale(p);
      if (kDLogsumexp && row < p.q_len) sum -= p.dlogsumexp[from];
      p.d[to] = sum / KeepScale(p);
    }
    float4* dq = reinterpret_cast<float4*>(p.dq_sum) + at * (kQKDim / 4);
    for (int i = lane; kDQ && i < kQKDim / 4; i += kLanes) dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

// dQ in the problem's dtype and layout: 64 rows of a tile. A thread takes 8 columns of two rows, what four lanes held.
extern "C" __global__ void __launch_bounds__(256)
    jax_flash_backward_finish(const __grid_constant__ jax_flash::Params p) {
  using namespace jax_flash;
  constexpr int kChunks = kQKDim / 8;
  const int padded = QTiles(p) * kRows;
  const int64_t at = int64_t(blockIdx.x) * 64;  // [batch, head, row]
  const int row0 = at % padded, head = at / padded % p.q_heads;
  const int64_t batch = at / padded / p.q_heads;
  const float scale = p.scale * KeepScale(p);
  for (int i = threadIdx.x; i < 32 * kChunks; i += 256) {
    const int chunk = i % kChunks, quad = i / kChunks % 8, warp = i / kChunks / 8;
    const float4* x = reinterpret_cast<const float4*>(p.dq_sum + (at + 16 * warp) * kQKDim) + chunk * 32 + quad * 4;
    uint32_t low[4], high[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 y = x[j];
      low[j] = Pack(y.x * scale, y.y * scale);
      high[j] = Pack(y.z * scale, y.w * scale);
    }
    const int row = row0 + 16 * warp + quad;
    uint4* to = static_cast<uint4*>(p.dq) + ((batch * p.q_len + row) * p.q_heads + head) * kChunks + chunk;
    if (row < p.q_len) *to = make_uint4(low[0], low[1], low[2], low[3]);
    if (row + 8 < p.q_len) to[8 * p.q_heads * kChunks] = make_uint4(high[0], high[1], high[2], high[3]);
  }
}
