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
// The host defines what config.cuh reads and JAX_FLASH_ROWS (of a tile of Q: 64 or 128), _CONSUMERS (warpgroups: 2) and
// _STAGES. It launches
//   jax_flash_backward_prepare  a block of 256 threads for each 32 rows of T rounded up to _ROWS, of each head
//   jax_flash_backward          at most one CTA a multiprocessor, of 128 (_CONSUMERS + 1) threads and
//                               `jax_flash_shared_bytes`; boxes of _ROWS rows in the maps of Q and dO, of 64 _CONSUMERS
//                               in those of K and V, and of 64 in those of dK and dV (where they are asked for)
//   jax_flash_backward_finish   if dQ is asked for: a block of 256 threads for each 64 rows of T rounded up to _ROWS
#pragma once

#include "common/philox.h"
#include "config.cuh"
#include "params.h"
#include "schedule.cuh"
#include "scores.cuh"
#include "tile/mbarrier.cuh"
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

constexpr int kCols = 64 * kConsumers;  // of a tile of S: keys
constexpr int kThreads = kWarpgroup * (kConsumers + 1);
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

__host__ __device__ constexpr int Boxes(int dim) { return (dim + 63) / 64; }
constexpr int kQKBoxes = Boxes(kQKDim), kVBoxes = Boxes(kVDim);
constexpr int kQBox = kRows * 128;   // bytes of a box of Q or dO
constexpr int kKVBox = kCols * 128;  // bytes of a box of K or V
constexpr int kDQBytes = kRows * kQKDim * 4;

constexpr bool kDS = kDQ || kDK;  // is dS needed?

// The warpgroups share the work on a tile of dQ: 64 rows each, or all rows and some of the columns. A part that is no
// whole box must not leave its box.
constexpr bool kSplitRows = kRows == kCols;
static_assert(kSplitRows || kRows == 64);
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
  alignas(1024) uint8_t ds[2][kRows / 64 * kKVBox];  // dS^T, boxes of [keys][64 rows]; at the end dV
  alignas(1024)
      uint8_t dq[kDQBytes > kQKBoxes* kKVBox ? kDQBytes : kQKBoxes * kKVBox];  // on its way out, in f32; at the end dK
  alignas(16) float minus_l[kStages][kRows];
  alignas(16) float d[kStages][kRows];
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t q_full[kStages], q_empty[kStages];
  uint64_t do_full[kStages], do_empty[kStages];
};
static_assert(sizeof(BackwardShared::ds) >= sizeof(BackwardShared::v));

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

// The 64 keys of one consumer warpgroup. A lane holds two of them: `key` and key + 8.
struct Consumer {
  const Params& p;
  BackwardShared& shared;
  const int warpgroup, warp, lane;
  const float scale_log2;
  uint32_t kv_parity = 0;
  Ring<kStages> at;  // the tile of Q and dO
  int buffer = 0;    // of dS

  float S[kRows / 2], dP[kRows / 2];  // transposed; S becomes P, dP becomes dS
  uint32_t P[kRows / 4], dS[kRows / 4];
  float dK[kQKDim / 2], dV[kVDim / 2], dQ[kDQFirst / 2];

  __device__ __forceinline__ Consumer(const Params& p, BackwardShared& shared)
      : p(p),
        shared(shared),
        warpgroup(Uniform(threadIdx.x / kWarpgroup) - 1),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        scale_log2(ScoreScale(p) * kLog2e) {}

  __device__ __forceinline__ void Release(uint64_t* barrier) { MbarrierArrive(barrier, lane == 0); }
  __device__ __forceinline__ void SyncConsumers() { BarrierSync(1, kConsumers * kWarpgroup); }
  __device__ __forceinline__ void SyncWarpgroup() { BarrierSync(2 + warpgroup, kWarpgroup); }

  // C = A B^T, or += : A this warpgroup's 64 rows of K or V, B a tile of Q or dO.
  template <int kDim>
  __device__ __forceinline__ void IssueKeysTimesRows(float (&C)[kRows / 2], const uint8_t* keys, const uint8_t* rows,
                                                     bool accumulate) {
    const uint64_t a = Descriptor(keys + warpgroup * 64 * 128, 0), b = Descriptor(rows, 0);
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
                                                const uint8_t* rows, bool accumulate) {
    const uint64_t b = Descriptor(rows, kQBox);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      Wgmma<kDim>::template RS<Major::kMN>(C, A + 4 * i, Advance(b, i * 16 * 128), accumulate || i > 0);
    WgmmaCommit();
  }

  // dQ = dS K, this warpgroup's part: `kWidth` columns.
  template <int kWidth>
  __device__ __forceinline__ void IssueDQ() {
    auto& C = reinterpret_cast<float (&)[kWidth / 2]>(dQ);
    constexpr int kSecond = kDQFirst / 64 * kKVBox + kDQFirst % 64 * 2;  // where the second warpgroup's columns start
    const uint64_t a = Descriptor(shared.ds[buffer] + (kSplitRows ? warpgroup * kKVBox : 0), 0);
    const uint64_t b = Descriptor(shared.k + (kSplitRows ? 0 : warpgroup * kSecond), kKVBox);
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < kCols / 16; ++j) {
      Wgmma<kWidth>::template SS<Major::kMN, Major::kMN>(C, Advance(a, j * 16 * 128), Advance(b, j * 16 * 128), j > 0);
    }
    WgmmaCommit();
  }

  // dQ_i in HBM += dQ.
  template <int kWidth>
  __device__ __forceinline__ void AddDQ(int64_t tile) {
    // A tile is a part for each warpgroup, then warp, register / 4, lane, register % 4.
    const int part = warpgroup * 64 * kDQFirst + warp * 16 * kWidth;
    float* staged = reinterpret_cast<float*>(shared.dq) + part;
    TmaWaitRead<0>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kWidth / 8; ++r) {
      reinterpret_cast<float4*>(staged)[r * 32 + lane] =
          make_float4(dQ[4 * r], dQ[4 * r + 1], dQ[4 * r + 2], dQ[4 * r + 3]);
    }
    FenceProxyAsync();
    __syncwarp();
    BulkReduceAdd(lane == 0, p.dq_sum + tile * kRows * kQKDim + part, staged, 16 * kWidth * 4);
    TmaCommit();
  }

  // S^T = -L / scale
  __device__ __forceinline__ void StartS() {
    const float4* memory = reinterpret_cast<const float4*>(shared.minus_l[at.index]) + lane % 4;
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      const float4 x = memory[4 * c];
      const float minus_l[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) S[8 * c + i] = minus_l[i / 4 * 2 + i % 2];
    }
    Pin(S);
  }

  __device__ __forceinline__ int Key(const Tile& tile) const {
    return tile.column + 64 * warpgroup + 16 * warp + lane / 4;
  }

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
      const Philox4 counter = {{uint32_t((tile.column / 16 + 4 * warpgroup + warp) * 4 + lane % 4),
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
    Stmatrix(to + c / 4 * kKVBox + (64 * warpgroup + 16 * warp + lane % 16) * 128 + chunk * 16, a, b, x, y);
  }

  __device__ __forceinline__ void Step(const Tile& tile, const Walk& walk, bool accumulate, bool last) {
    const int row0 = walk.q_tile * kRows;
    MbarrierWait(&shared.q_full[at.index], at.parity);
    if (kStartAtL) StartS();
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
      if (kDV) IssueGradient<kVDim>(dV, P, shared.d_o[at.index], accumulate);
    }
    WgmmaWait<kEarlyDV && kDV ? 1 : 0>();
    Pin(dP);
    if (last) Release(&shared.v_empty);
    ComputeDS();
    if (kDV && !kEarlyDV) IssueGradient<kVDim>(dV, P, shared.d_o[at.index], accumulate);
    if (kDQ) {
#pragma unroll
      for (int c = 0; c < kRows / 16; ++c)
        Store(shared.ds[buffer], c, dS[4 * c], dS[4 * c + 1], dS[4 * c + 2], dS[4 * c + 3]);
      FenceProxyAsync();
      SyncConsumers();
      if (warpgroup == 0 || kDQSecond == kDQFirst) {
        IssueDQ<kDQFirst>();
      } else if constexpr (kDQSecond > 0) {
        IssueDQ<kDQSecond>();
      }
    }
    if (kDK) IssueGradient<kQKDim>(dK, dS, shared.q[at.index], accumulate);
    WgmmaWait<kDQ && kDK ? 1 : 0>();
    Pin(dV);
    Pin(dQ);
    Release(&shared.do_empty[at.index]);
    if (last) Release(&shared.k_empty);
    if (kDQ) {
      if (warpgroup == 0 || kDQSecond == kDQFirst) {
        AddDQ<kDQFirst>(walk.Index(p, tile));
      } else if constexpr (kDQSecond > 0) {
        AddDQ<kDQSecond>(walk.Index(p, tile));
      }
    }
    WgmmaWait<0>();
    Pin(dK);
    Release(&shared.q_empty[at.index]);
    at.Next();
    buffer ^= 1;
  }

  __device__ __forceinline__ void Run(const Tile& tile, const TensorMap* dk_map, const TensorMap* dv_map) {
    MbarrierWait(&shared.k_full, kv_parity);
    MbarrierWait(&shared.v_full, kv_parity);
    kv_parity ^= 1;
    TmaWaitRead<0>();  // the gradients before have left
    SyncConsumers();
    Walk walk(p, tile);
    if (walk.Done()) {
      Release(&shared.k_empty);
      Release(&shared.v_empty);
#pragma unroll
      for (int i = 0; i < kQKDim / 2; ++i) dK[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kVDim / 2; ++i) dV[i] = 0.0f;
    }
    for (bool accumulate = false; !walk.Done(); accumulate = true) {
      const Walk here = walk;
      walk.Next(tile);
      Step(tile, here, accumulate, walk.Done());
    }
    TmaWaitRead<0>();
    SyncConsumers();  // the last dQ has read all of dS, and left
    if (kDV) Write<kVDim>(dV, kDropout ? p.keep_scale : 1.0f, shared.ds[0]);
    if (kDK) Write<kQKDim>(dK, KeepScale(p) * p.scale, shared.dq);
    FenceProxyAsync();
    SyncWarpgroup();
    if (threadIdx.x % kWarpgroup == 0) {
      const int key = 64 * warpgroup;
      for (int b = 0; kDV && b < kVBoxes; ++b)
        TmaStore(dv_map, shared.ds[0] + b * kKVBox + key * 128, b * 64, tile.column + key, tile.head, tile.batch);
      for (int b = 0; kDK && b < kQKBoxes; ++b)
        TmaStore(dk_map, shared.dq + b * kKVBox + key * 128, b * 64, tile.column + key, tile.head, tile.batch);
      TmaCommit();
    }
  }

  template <int kDim>
  __device__ __forceinline__ void Write(const float (&C)[kDim / 2], float scale, uint8_t* to) {
#pragma unroll
    for (int c = 0; c < kDim / 8; c += 2) {
      const float* x = C + 4 * c;
      const bool whole = c + 1 < kDim / 8;  // or what comes after is outside
      Store(to, c / 2, Pack(x[0] * scale, x[1] * scale), Pack(x[2] * scale, x[3] * scale),
            whole ? Pack(x[4] * scale, x[5] * scale) : 0, whole ? Pack(x[6] * scale, x[7] * scale) : 0);
    }
  }
};

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
  Schedule<kCausal> schedule;
  Tile tile;
  if (threadIdx.x < kWarpgroup) {
    SetMaxRegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer producer{p, shared};
      while (Next(p, &schedule, &tile)) producer.Run(tile, &q_map, &k_map, &v_map, &do_map);
    }
  } else {
    SetMaxRegistersUp<kConsumerRegisters>();
    Consumer consumer(p, shared);
    while (Next(p, &schedule, &tile)) {
      tile.column = Uniform(tile.column);  // the compiler cannot tell
      tile.first = Uniform(tile.first), tile.end = Uniform(tile.end);
      tile.every_lo = Uniform(tile.every_lo), tile.every_hi = Uniform(tile.every_hi);
      consumer.Run(tile, &dk_map, &dv_map);
    }
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
    const bool second = chunk >= kDQFirst / 8;
    const int width = second ? kDQSecond : kDQFirst, start = second ? kDQFirst : 0;
    const float4* x = reinterpret_cast<const float4*>(p.dq_sum + at * kQKDim + 64 * start + 16 * warp * width) +
                      (chunk - start / 8) * 32 + quad * 4;
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
