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
// The host defines JAX_FLASH_HEAD_DIM (64 or 128), _ROWS (of a tile of Q: 64 or 128), _CONSUMERS (warpgroups: 2),
// _STAGES, _CAUSAL and _DROPOUT; it launches at most one CTA a multiprocessor, of 128 (_CONSUMERS + 1) threads and
// `jax_flash_shared_bytes`, with boxes of _ROWS rows in the maps of Q and dO, of 64 _CONSUMERS rows in those of K and
// V, and of 64 rows in those of dK and dV.
#pragma once

#include "common/philox.h"
#include "schedule.cuh"
#include "tile/mbarrier.cuh"
#include "tile/tma.cuh"
#include "tile/types.cuh"
#include "tile/warp.cuh"
#include "tile/wgmma.cuh"

namespace jax_flash {

constexpr int kHeadDim = JAX_FLASH_HEAD_DIM;
constexpr int kRows = JAX_FLASH_ROWS;
constexpr int kConsumers = JAX_FLASH_CONSUMERS;
constexpr int kStages = JAX_FLASH_STAGES;  // tiles of Q, and of dO, in flight
constexpr bool kCausal = JAX_FLASH_CAUSAL;
constexpr bool kDropout = JAX_FLASH_DROPOUT;

constexpr int kCols = 64 * kConsumers;  // of a tile of S: keys
constexpr int kThreads = kWarpgroup * (kConsumers + 1);
constexpr int kBoxes = kHeadDim / 64;
constexpr int kQBox = kRows * 128;   // bytes of a box of Q or dO
constexpr int kKVBox = kCols * 128;  // bytes of a box of K or V
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
static_assert(kConsumers == 2);

// The warpgroups share the work on a tile of dQ: 64 rows each, or all rows and half the columns.
constexpr bool kSplitRows = kRows == kCols;
static_assert(kSplitRows || (kRows == 64 && kHeadDim == 128));
constexpr int kDqCols = kSplitRows ? kHeadDim : kHeadDim / kConsumers;
constexpr int kDqWarp = 16 * kDqCols;  // elements of one warp's part

// dV += P^T dO can start before dS is known where there are registers for P in both precisions.
constexpr bool kEarlyDV = kRows == 64;
// S^T can start at -L / scale instead of 0: then nobody waits for L, and the subtraction costs nothing. With 128 rows
// to fetch it costs more than it saves.
constexpr bool kStartAtL = kRows == 64;

struct BackwardParams {
  int batch, q_heads, kv_heads;
  int q_len, kv_len;
  float scale;
  const float* l;  // of the forward, [batch, head, row]
  const float* m;
  float* minus_l;  // -L / scale, [batch, head, place of the row]; -inf where a row has no key
  float* d;        // D, likewise
  float* dq;       // [batch, head, tile, warp, register / 4, lane, 4]: as the warps hold it
  const uint32_t *seed, *batch_id, *head_id;
  uint32_t drop_threshold;
  float keep_scale;
};

__device__ __forceinline__ int QTiles(const BackwardParams& p) { return (p.q_len + kRows - 1) / kRows; }

// L and D are stored in whole tiles, 16 rows lane by lane: one float4 is what a lane needs of a 16 x 16 tile.
__device__ __forceinline__ int Place(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

struct BackwardShared {
  alignas(1024) uint8_t k[kBoxes * kKVBox];
  alignas(1024) uint8_t v[kBoxes * kKVBox];
  alignas(1024) uint8_t q[kStages][kBoxes * kQBox];
  alignas(1024) uint8_t d_o[kStages][kBoxes * kQBox];
  alignas(1024) uint8_t ds[2][kRows / 64 * kKVBox];  // dS^T, boxes of [keys][64 rows]; at the end dV
  alignas(1024) float dq[4 * kConsumers][kDqWarp];   // on its way out; at the end dK
  alignas(16) float minus_l[kStages][kRows];
  alignas(16) float d[kStages][kRows];
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t q_full[kStages], q_empty[kStages];
  uint64_t do_full[kStages], do_empty[kStages];
};
static_assert(sizeof(BackwardShared::ds) >= kBoxes * kKVBox && sizeof(BackwardShared::dq) >= kBoxes * kKVBox);

// A tile of K and V, and the tiles of Q that see it: from `first` on, of each query head of the group.
struct Tile {
  int column, head, batch, first, steps;
};

__device__ __forceinline__ bool Next(const BackwardParams& p, Schedule<kCausal>* schedule, Tile* tile) {
  int head, t;
  if (!schedule->Next(p.batch * p.kv_heads, (p.kv_len + kCols - 1) / kCols, &head, &t)) return false;
  tile->column = t * kCols;
  tile->head = head % p.kv_heads;
  tile->batch = head / p.kv_heads;
  tile->first = kCausal ? min(tile->column / kRows, QTiles(p)) : 0;
  tile->steps = (QTiles(p) - tile->first) * (p.q_heads / p.kv_heads);
  return true;
}

// The tiles of Q, in the order in which a CTA walks them.
struct Walk {
  int head, q_tile;
  __device__ __forceinline__ Walk(const BackwardParams& p, const Tile& tile)
      : head(tile.head * (p.q_heads / p.kv_heads)), q_tile(tile.first) {}
  __device__ __forceinline__ void Next(const BackwardParams& p, const Tile& tile) {
    if (++q_tile == QTiles(p)) q_tile = tile.first, ++head;
  }
  // Among the tiles of all heads.
  __device__ __forceinline__ int64_t Index(const BackwardParams& p, const Tile& tile) const {
    return (int64_t(tile.batch) * p.q_heads + head) * QTiles(p) + q_tile;
  }
};

struct Producer {
  const BackwardParams& p;
  BackwardShared& shared;
  Ring<kStages> at;
  uint32_t kv_parity = 0;

  __device__ __forceinline__ void Run(const Tile& tile, const TensorMap* q_map, const TensorMap* k_map,
                                      const TensorMap* v_map, const TensorMap* do_map) {
    MbarrierWait(&shared.k_empty, kv_parity ^ 1);
    MbarrierArriveExpectTx(&shared.k_full, kBoxes * kKVBox);
    for (int b = 0; b < kBoxes; ++b)
      TmaLoad(shared.k + b * kKVBox, k_map, &shared.k_full, b * 64, tile.column, tile.head, tile.batch);
    MbarrierWait(&shared.v_empty, kv_parity ^ 1);
    MbarrierArriveExpectTx(&shared.v_full, kBoxes * kKVBox);
    for (int b = 0; b < kBoxes; ++b)
      TmaLoad(shared.v + b * kKVBox, v_map, &shared.v_full, b * 64, tile.column, tile.head, tile.batch);
    kv_parity ^= 1;
    Walk walk(p, tile);
    for (int n = 0; n < tile.steps; ++n, at.Next(), walk.Next(p, tile)) {
      const int row = walk.q_tile * kRows;
      const int64_t statistics = walk.Index(p, tile) * kRows;
      MbarrierWait(&shared.q_empty[at.index], at.parity ^ 1);
      MbarrierArriveExpectTx(&shared.q_full[at.index], kBoxes * kQBox + kRows * 4);
      for (int b = 0; b < kBoxes; ++b)
        TmaLoad(shared.q[at.index] + b * kQBox, q_map, &shared.q_full[at.index], b * 64, row, walk.head, tile.batch);
      BulkLoad(shared.minus_l[at.index], p.minus_l + statistics, kRows * 4, &shared.q_full[at.index]);
      MbarrierWait(&shared.do_empty[at.index], at.parity ^ 1);
      MbarrierArriveExpectTx(&shared.do_full[at.index], kBoxes * kQBox + kRows * 4);
      for (int b = 0; b < kBoxes; ++b)
        TmaLoad(shared.d_o[at.index] + b * kQBox, do_map, &shared.do_full[at.index], b * 64, row, walk.head,
                tile.batch);
      BulkLoad(shared.d[at.index], p.d + statistics, kRows * 4, &shared.do_full[at.index]);
    }
  }
};

// The 64 keys of one consumer warpgroup. A lane holds two of them: `key` and key + 8.
struct Consumer {
  const BackwardParams& p;
  BackwardShared& shared;
  const int warpgroup, warp, lane;
  const float scale_log2;
  uint32_t kv_parity = 0;
  Ring<kStages> at;  // the tile of Q and dO
  int buffer = 0;    // of dS

  float S[kRows / 2], dP[kRows / 2];  // transposed; S becomes P, dP becomes dS
  uint32_t P[kRows / 4], dS[kRows / 4];
  float dK[kHeadDim / 2], dV[kHeadDim / 2], dQ[kDqCols / 2];

  __device__ __forceinline__ Consumer(const BackwardParams& p, BackwardShared& shared)
      : p(p),
        shared(shared),
        warpgroup(__shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarpgroup, 0) - 1),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        scale_log2(p.scale * kLog2e) {}

  __device__ __forceinline__ void Release(uint64_t* barrier) { MbarrierArrive(barrier, lane == 0); }
  __device__ __forceinline__ void SyncConsumers() { BarrierSync(1, kConsumers * kWarpgroup); }
  __device__ __forceinline__ void SyncWarpgroup() { BarrierSync(2 + warpgroup, kWarpgroup); }

  // C = A B^T, or += : A this warpgroup's 64 rows of K or V, B a tile of Q or dO.
  __device__ __forceinline__ void IssueKeysTimesRows(float (&C)[kRows / 2], const uint8_t* keys, const uint8_t* rows,
                                                     bool accumulate) {
    const uint64_t a = Descriptor(keys + warpgroup * 64 * 128, 0), b = Descriptor(rows, 0);
    WgmmaFence();
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      Wgmma<kRows>::template SS<Major::kK, Major::kK>(C, Advance(a, d / 4 * kKVBox + d % 4 * 32),
                                                      Advance(b, d / 4 * kQBox + d % 4 * 32), accumulate || d > 0);
    }
    WgmmaCommit();
  }

  // C += A B: A = P^T or dS^T, B a tile of dO or Q.
  __device__ __forceinline__ void IssueGradient(float (&C)[kHeadDim / 2], const uint32_t (&A)[kRows / 4],
                                                const uint8_t* rows, bool accumulate) {
    const uint64_t b = Descriptor(rows, kQBox);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      Wgmma<kHeadDim>::template RS<Major::kMN>(C, A + 4 * i, Advance(b, i * 16 * 128), accumulate || i > 0);
    WgmmaCommit();
  }

  // dQ = dS K, this warpgroup's part.
  __device__ __forceinline__ void IssueDQ() {
    const uint64_t a = Descriptor(shared.ds[buffer] + (kSplitRows ? warpgroup * kKVBox : 0), 0);
    const uint64_t b = Descriptor(shared.k + (kSplitRows ? 0 : warpgroup * kDqCols / 64 * kKVBox), kKVBox);
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < kCols / 16; ++j) {
      Wgmma<kDqCols>::template SS<Major::kMN, Major::kMN>(dQ, Advance(a, j * 16 * 128), Advance(b, j * 16 * 128),
                                                          j > 0);
    }
    WgmmaCommit();
  }

  // dQ_i in HBM += dQ.
  __device__ __forceinline__ void AddDQ(int64_t tile) {
    float* dq = p.dq + (tile * 4 * kConsumers + 4 * warpgroup + warp) * kDqWarp;
    float* staged = shared.dq[4 * warpgroup + warp];
    TmaWaitRead<0>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kDqCols / 8; ++r) {
      reinterpret_cast<float4*>(staged)[r * 32 + lane] =
          make_float4(dQ[4 * r], dQ[4 * r + 1], dQ[4 * r + 2], dQ[4 * r + 3]);
    }
    FenceProxyAsync();
    __syncwarp();
    BulkReduceAdd(lane == 0, dq, staged, kDqWarp * 4);
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

  // S^T is masked and becomes P^T.
  __device__ __forceinline__ void Softmax(const Tile& tile, int row0) {
    if ((kCausal && row0 < tile.column + kCols) || tile.column + kCols > p.kv_len) {
      const int key = tile.column + 64 * warpgroup + 16 * warp + lane / 4;
      const int row = row0 + lane % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int first = key + 8 * h >= p.kv_len ? kRows : kCausal ? key + 8 * h - row : -kRows;  // row that sees it
#pragma unroll
        for (int i = 2 * h; i < kRows / 2; i += 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (i / 4 * 8 + e < first) S[i + e] = -Infinity();
          }
        }
      }
    }
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
  }

  // Marks the dropped entries of P^T by their sign.
  __device__ __forceinline__ void Drop(const Tile& tile, int row0, int head) {
    const uint32_t seed0 = p.seed[2 * tile.batch], seed1 = p.seed[2 * tile.batch + 1];
    const uint32_t threshold = p.drop_threshold << 16;
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
        if (x << 16 < threshold) s[0] = -s[0];
        if (x < threshold) s[1] = -s[1];  // its low half cannot matter: the threshold's is 0
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
    IssueKeysTimesRows(S, shared.k, shared.q[at.index], kStartAtL);
    MbarrierWait(&shared.do_full[at.index], at.parity);
    IssueKeysTimesRows(dP, shared.v, shared.d_o[at.index], false);
    WgmmaWait<1>();
    Pin(S);
    Softmax(tile, row0);
    if (kDropout) Drop(tile, row0, walk.head);
    if (kEarlyDV) {
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) P[i] = PackP(S[2 * i], S[2 * i + 1]);
      IssueGradient(dV, P, shared.d_o[at.index], accumulate);
      WgmmaWait<1>();
    } else {
      WgmmaWait<0>();
    }
    Pin(dP);
    if (last) Release(&shared.v_empty);
    ComputeDS();
    if (!kEarlyDV) IssueGradient(dV, P, shared.d_o[at.index], accumulate);
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c)
      Store(shared.ds[buffer], c, dS[4 * c], dS[4 * c + 1], dS[4 * c + 2], dS[4 * c + 3]);
    FenceProxyAsync();
    SyncConsumers();
    IssueDQ();
    IssueGradient(dK, dS, shared.q[at.index], accumulate);
    WgmmaWait<1>();
    Pin(dV);
    Pin(dQ);
    Release(&shared.do_empty[at.index]);
    if (last) Release(&shared.k_empty);
    AddDQ(walk.Index(p, tile));
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
    for (int n = 0; n < tile.steps; ++n, walk.Next(p, tile)) Step(tile, walk, n > 0, n + 1 == tile.steps);
    if (tile.steps == 0) {
      Release(&shared.k_empty);
      Release(&shared.v_empty);
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dK[i] = dV[i] = 0.0f;
    }
    TmaWaitRead<0>();
    SyncConsumers();  // the last dQ has read all of dS, and left
    const float keep_scale = kDropout ? p.keep_scale : 1.0f;
    uint8_t* dv = shared.ds[0];
    uint8_t* dk = reinterpret_cast<uint8_t*>(shared.dq);
    Write(dV, keep_scale, dv);
    Write(dK, keep_scale * p.scale, dk);
    FenceProxyAsync();
    SyncWarpgroup();
    if (threadIdx.x % kWarpgroup == 0) {
      for (int b = 0; b < kBoxes; ++b) {
        const int box = b * kKVBox + 64 * warpgroup * 128;
        TmaStore(dv_map, dv + box, b * 64, tile.column + 64 * warpgroup, tile.head, tile.batch);
        TmaStore(dk_map, dk + box, b * 64, tile.column + 64 * warpgroup, tile.head, tile.batch);
      }
      TmaCommit();
    }
  }

  __device__ __forceinline__ void Write(const float (&C)[kHeadDim / 2], float scale, uint8_t* to) {
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c) {
      const float* x = C + 8 * c;
      Store(to, c, Pack(x[0] * scale, x[1] * scale), Pack(x[2] * scale, x[3] * scale), Pack(x[4] * scale, x[5] * scale),
            Pack(x[6] * scale, x[7] * scale));
    }
  }
};

}  // namespace jax_flash

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(jax_flash::BackwardShared);

extern "C" __global__ void __launch_bounds__(jax_flash::kThreads, 1) jax_flash_backward(
    const __grid_constant__ jax_flash::BackwardParams p, const __grid_constant__ jax_flash::TensorMap q_map,
    const __grid_constant__ jax_flash::TensorMap k_map, const __grid_constant__ jax_flash::TensorMap v_map,
    const __grid_constant__ jax_flash::TensorMap do_map, const __grid_constant__ jax_flash::TensorMap dk_map,
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
      if (kCausal)
        tile.column = Uniform(tile.column), tile.steps = Uniform(tile.steps),
        tile.first = Uniform(tile.first);  // the compiler cannot tell
      consumer.Run(tile, &dk_map, &dv_map);
    }
  }
}

// D = rowsum(dO O), -L / scale, and zeros for dQ. A thread takes 8 elements of a row; 256 threads a block.
extern "C" __global__ void jax_flash_backward_prepare(const __grid_constant__ jax_flash::BackwardParams p,
                                                      const uint4* __restrict__ o, const uint4* __restrict__ d_o) {
  using namespace jax_flash;
  constexpr int kLanes = kHeadDim / 8;
  const int padded = QTiles(p) * kRows;
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;  // [batch, head, row]
  const int lane = threadIdx.x % kLanes;
  const int row = at % padded, head = at / padded % p.q_heads;
  const int64_t batch = at / padded / p.q_heads;
  if (batch >= p.batch) return;
  float sum = 0.0f;
  if (row < p.q_len) {
    const int64_t from = ((batch * p.q_len + row) * p.q_heads + head) * kLanes + lane;
    const uint4 x = o[from], y = d_o[from];
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
    p.minus_l[to] = l == 0.0f ? -Infinity() : -(p.m[from] + logf(l)) / p.scale;
    // dS / keep_scale = P (Z / keep_scale dP - D / keep_scale): the factor comes with the results.
    p.d[to] = kDropout ? sum / p.keep_scale : sum;
  }
  float4* dq = reinterpret_cast<float4*>(p.dq) + at * (kHeadDim / 4) + lane;
  dq[0] = dq[kLanes] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// dQ in the problem's dtype and layout. A block of 4 kDqCols threads takes one warpgroup's part of a tile, a thread 8
// columns of two rows: what four lanes hold.
extern "C" __global__ void jax_flash_backward_finish(const __grid_constant__ jax_flash::BackwardParams p,
                                                     uint4* __restrict__ dq) {
  using namespace jax_flash;
  constexpr int kChunks = kDqCols / 8;
  const int warpgroup = blockIdx.x % kConsumers, tile = blockIdx.x / kConsumers;  // of [batch, head, tile]
  const int q_tile = tile % QTiles(p), head = tile / QTiles(p) % p.q_heads;
  const int64_t batch = tile / QTiles(p) / p.q_heads;
  const int chunk = threadIdx.x % kChunks, quad = threadIdx.x / kChunks % 8, warp = threadIdx.x / kChunks / 8;
  const float4* x =
      reinterpret_cast<const float4*>(p.dq + (int64_t(blockIdx.x) * 4 + warp) * kDqWarp) + chunk * 32 + quad * 4;
  const float scale = p.scale * (kDropout ? p.keep_scale : 1.0f);
  uint32_t low[4], high[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 y = x[i];
    low[i] = Pack(y.x * scale, y.y * scale);
    high[i] = Pack(y.z * scale, y.w * scale);
  }
  const int row = q_tile * kRows + (kSplitRows ? 64 * warpgroup : 0) + 16 * warp + quad;
  const int column = (kSplitRows ? 0 : kChunks * warpgroup) + chunk;
  uint4* to = dq + ((batch * p.q_len + row) * p.q_heads + head) * (kHeadDim / 8) + column;
  if (row < p.q_len) *to = make_uint4(low[0], low[1], low[2], low[3]);
  if (row + 8 < p.q_len) to[p.q_heads * kHeadDim] = make_uint4(high[0], high[1], high[2], high[3]);
}
