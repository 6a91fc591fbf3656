// What every consumer warpgroup of the Hopper backward does: S^T, P^T, dP^T and dS^T of 64 keys, in registers.
#pragma once

#include "hopper/backward_tiles.cuh"
#include "ptx/wgmma.cuh"
#include "semantics/philox.cuh"
#include "semantics/score.cuh"

namespace jax_flash {

// dV += P^T dO can start before dS is known where there are registers for P in both precisions.
constexpr bool kEarlyDV = kRows == 64;
static_assert(kEarlyDV || !kSoftCap);
// S^T can start at -L / scale: then nobody waits for L, and the subtraction costs nothing. With 128 rows to fetch it
// costs more than it saves. (To start at 0 explicitly tells the compiler that S was not needed before.)
constexpr bool kStart = kRows == 64 && !kTF32Wide, kStartAtL = kStart && !kScores;

// Named barriers, if both warpgroups have the same keys.
constexpr int kPFull = 4, kPRead = 5;

// Where registers are so few that segments and the mask have to be looked up a few entries at a time, ...
constexpr bool kFewAtOnce = kWide || kBias || kSoftCap;
// ... or that there are none to work ahead, if more is asked than a causal mask.
constexpr bool kCrowded =
    kWide && !kBias &&
    (kSoftCap || kMask || kDropout || kWindow || kSegments || kQLengths || kKVLengths || kQueryOffset);

// With dropout L of the last rows is not read before the exponentials of the first are done, ...
constexpr bool kInHalves = kRows == 128 && kDropout && !kAlongside;
// ... and with a mask the scale is read in every step, or registers would be spilled.
constexpr bool kLateScale = !kScores && !kAlongside && (kRows == 128 ? kMask : kBlockMask && kQKDim > 96 && !kDropout);

// What exp2 of a difference of scores needs, before and after S became s.
__device__ __forceinline__ float ScoreScale(const Params& p) { return kScores ? 1.0f : ScaleOf(p); }

// dS is computed without the factor of the kept entries, which comes with the results.
__device__ __forceinline__ float DQKScale(const Params& p) { return KeptScale(p) * ScaleOf(p); }

// L and D are stored in whole tiles, 16 rows lane by lane: one float4 is what a lane needs of a 16 x 16 tile.
__device__ __forceinline__ int Place(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

__device__ __forceinline__ void SyncConsumers() { BarrierSync(1, kConsumers * kWarpgroup); }

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
  uint32_t hidden_in_block[2];

  __device__ __forceinline__ Keys(const Params& p, BackwardShared& shared)
      : p(p),
        shared(shared),
        warpgroup(Uniform(threadIdx.x / kWarpgroup - 1)),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        first_key(kSameKeys ? 0 : 64 * warpgroup),
        scale_log2(ScoreScale(p) * kLog2e) {}

  // Waits for the next tile; false when there are no more. TileHere: that one, which stays until the tile after the
  // next.
  __device__ __forceinline__ bool NextTile() {
    MbarrierWait(&shared.k_full, kv_parity);
    if (Uniform(shared.tile[kv_parity].column) < 0) return false;
    MbarrierWait(&shared.v_full, kv_parity);
    kv_parity ^= 1;
    return true;
  }
  __device__ __forceinline__ const Tile& TileHere() const { return shared.tile[kv_parity ^ 1]; }

  __device__ __forceinline__ void WaitForQ() { MbarrierWait(&shared.q_full[at.index], at.parity); }

  // The tile of Q that is there. (Better asked when the tensor cores are at work: the answer takes a while.)
  __device__ __forceinline__ Step StepHere() {
    const Step& step = shared.step[at.index];
    return {Uniform(step.row),          Uniform(step.head),
            Uniform(step.row_block),    kBlockMask ? Uniform(step.kind) : kEverything,
            bool(Uniform(step.masked)), bool(Uniform(step.last))};
  }

  template <int kCount>
  __device__ __forceinline__ void Clear(float (&C)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) C[i] = 0.0f;
  }

  __device__ __forceinline__ void Release(uint64_t* barrier) { MbarrierArrive(barrier, ArrivesForWarp(lane)); }
  // By a warp that has read L or D by loads: a fence before the copy engine may write there.
  __device__ __forceinline__ void ReleaseRows(uint64_t* barrier) {
    FenceProxyAsync();
    Release(barrier);
  }
  __device__ __forceinline__ void SyncWarpgroup() { BarrierSync(2 + warpgroup, kWarpgroup); }

  // C = A B^T, or += : A this warpgroup's 64 rows of K or V, B a tile of Q or dO.
  template <int kDim>
  __device__ __forceinline__ void IssueKeysTimesRows(float (&C)[kRows / 2], const uint8_t* keys, const uint8_t* rows,
                                                     bool accumulate) {
    const uint64_t a = Descriptor(keys + first_key * 128, 0), b = Descriptor(rows, 0);
    WgmmaFence();
#pragma unroll
    for (int d = 0; d < (kDim + kStep - 1) / kStep; ++d) {
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

  // S^T = -L / scale, or 0
  __device__ __forceinline__ void StartS() {
    Clear(S);
    const float4* memory = reinterpret_cast<const float4*>(shared.minus_l[at.index][0]) + lane % 4;
#pragma unroll
    for (int c = 0; kStartAtL && c < kRows / 16; ++c) {
      const float4 x = memory[4 * c];
      const float minus_l[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) S[8 * c + i] = minus_l[i / 4 * 2 + i % 2];
    }
    Pin(S);
  }

  __device__ __forceinline__ int Key(const Tile& tile) const { return tile.column + first_key + 16 * warp + lane / 4; }

  // S^T becomes s^T: scale, soft cap, bias. The derivative of the soft cap is left in dS.
  __device__ __forceinline__ void Score(const Tile& tile, const Step& step) {
    const Entries entries(p, tile.batch, step.head);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      if (kWide && kBias && i % 8 == 0 && Never()) return;
      const int row = step.row + lane % 4 * 2 + i / 4 * 8 + i % 2, key = Key(tile) + i / 2 % 2 * 8;
      S[i] = Cap(p, S[i]);
      if (kSoftCap && i % 2 == 1) dS[i / 2] = Pack(CapDerivative(p, S[i - 1]), CapDerivative(p, S[i]));
      // Entries outside are hidden later.
      if (kBias && i % 2 == 1) S[i - 1] += entries.Bias(min(row - 1, p.q_len - 1), min(key, p.kv_len - 1));
      if (kBias && i % 2 == 1) S[i] += entries.Bias(min(row, p.q_len - 1), min(key, p.kv_len - 1));
    }
  }

  // Entries that may not attend become -inf.
  __device__ __forceinline__ void Hide(const Tile& tile, const Step& step) {
    const Positions positions = PositionsOf(p, tile.batch);
    const Entries entries(p, tile.batch, step.head);
    const int row = step.row + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = Key(tile) + 8 * h;
      const RowRange rows = AnyKeyRows(positions, key, key + 1);
      const int first = rows.lo < rows.hi ? min(rows.lo - row, int64_t(kRows)) : kRows, end = rows.hi - row;
      uint32_t hidden = kBlockMask ? hidden_in_block[h] : 0;
#pragma unroll 4
      for (int x = 0; kFewAtOnce && (kSegments || kMask) && x < kRows / 4; ++x) {
        const int r = x / 2 * 8 + x % 2;
        hidden |= uint32_t(first <= r && r < end && entries.Hidden(row + r, key)) << x;
      }
#pragma unroll
      for (int i = 2 * h; i < kRows / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int r = i / 4 * 8 + e;
          const bool outside = r < first || ((kWindow || kSegments || kMask || kBias) && r >= end);
          if (kBlockMask && !kFewAtOnce && (hidden >> (i / 4 * 2 + e) & 1)) S[i + e] = -Infinity();
          if (outside || (kFewAtOnce ? hidden >> (i / 4 * 2 + e) & 1 : entries.Hidden(row + r, key))) {
            S[i + e] = -Infinity();
          }
        }
      }
    }
  }

  // With a block mask: which of this lane's rows may not attend to its keys, as Hide numbers them.
  __device__ __forceinline__ void Look(const Tile& tile, const Step& step) {
    if (!kBlockMask || !step.masked) return;
    const Block block(p, tile.batch, step.kind);
    const int key = Key(tile), row = step.row + lane % 4 * 2;
    hidden_in_block[0] = hidden_in_block[1] = 0;
#pragma unroll 8
    for (int x = 0; x < kRows / 4; ++x) {
      const uint32_t hidden = ~block.Columns(row + x / 2 * 8 + x % 2, key / 16 * 16) >> key % 16;
      hidden_in_block[0] |= (hidden & 1) << x;
      hidden_in_block[1] |= (hidden >> 8 & 1) << x;
    }
  }

  // s^T - m, of 16 rows.
  __device__ __forceinline__ void SubtractM(int c) {
    const float4 x = (reinterpret_cast<const float4*>(shared.minus_l[at.index][kMaximumApart]) + lane % 4)[4 * c];
    const float m[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) S[8 * c + i] -= m[i / 4 * 2 + i % 2];
  }

  // S^T is masked and becomes P^T.
  __device__ __forceinline__ void Softmax(const Tile& tile, const Step& step) {
    if (kScores) Score(tile, step);
    if (step.masked) Hide(tile, step);
    if (kCrowded && Never()) return;
    const float scale_log2 = kLateScale ? __ldg(p.scale + Fresh(0)) * kLog2e : this->scale_log2;
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      if (kInHalves && c == kRows / 32 && Never()) return;
      const float4 x =
          kStartAtL ? float4() : (reinterpret_cast<const float4*>(shared.minus_l[at.index][0]) + lane % 4)[4 * c];
      const float minus_l[4] = {x.x * scale_log2, x.y * scale_log2, x.z * scale_log2, x.w * scale_log2};
      if (kMaximumApart) SubtractM(c);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        S[8 * c + i] =
            Exp2(kStartAtL ? S[8 * c + i] * scale_log2 : fmaf(S[8 * c + i], scale_log2, minus_l[i / 4 * 2 + i % 2]));
      }
    }
    if (kDropout) Drop(tile, step);
  }

  // Marks the dropped entries of P^T by their sign.
  __device__ __forceinline__ void Drop(const Tile& tile, const Step& step) {
    if (kScores && Never()) return;
    const uint32_t seed0 = p.seed[2 * tile.batch], seed1 = p.seed[2 * tile.batch + 1];
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      // Before the last words of the tile, so that ptxas does not work ahead with all of them.
      if (kRows == 128 && c == kRows / 16 - 1 && Never()) return;
      // The words of the forward's lane of this 16 x 16 tile; transposed they are this lane's.
      const Philox4 counter = {{uint32_t((tile.column / 16 + first_key / 16 + warp) * 4 + lane % 4),
                                uint32_t((step.row / 16 + c) * 8 + lane / 4), p.head_id[step.head],
                                p.batch_id[tile.batch]}};
      const Philox4 random = Philox(counter, seed0, seed1);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t x = Movmatrix(random.x[w]);
        float* s = S + 8 * c + w / 2 * 4 + w % 2 * 2;
        if (Dropped(p, x, 0)) s[0] = -s[0];
        if (Dropped(p, x, 1)) s[1] = -s[1];
      }
    }
  }

  __device__ __forceinline__ static uint32_t PackP(float low, float high) {
    return kDropout ? PackRelu(low, high) : Pack(low, high);
  }

  // P in its other precision, before the derivative of the soft cap joins it for the sake of dS.
  __device__ __forceinline__ void RoundP() {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      P[i] = PackP(S[2 * i], S[2 * i + 1]);
      if (kSoftCap) {
        const float2 derivative = Unpack(dS[i]);
        S[2 * i] *= derivative.x, S[2 * i + 1] *= derivative.y;
      }
    }
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
        if (!kTF32 && i % 2 == 1) {
          dS[i / 2] = Pack(dP[i - 1], dP[i]);
          if (!kEarlyDV) P[i / 2] = PackP(S[i - 1], S[i]);
        }
      }
    }
  }

  // The lane; in wide kernels for addresses that are not worked out beforehand.
  __device__ __forceinline__ int LateLane() const { return kWide ? Fresh(lane) : lane; }

  // Of boxes of keys in shared memory: the c-th 32 bytes of this warp's keys. (As four addresses for all boxes, to
  // which c / 4 is an offset in the instruction; or where even these are too many registers as one.)
  __device__ __forceinline__ uint32_t Matrices(const uint8_t* keys, int lane, int c) const {
    const uint8_t* const rows = keys + c / 4 * kKVBox + (first_key + 16 * warp) * 128;
    if constexpr (kSameKeys) return MatricesOf(rows, lane, c % 4);
    return SharedAddress(rows + lane % 16 * 128 + ((c % 4 * 2 + lane / 16) ^ lane % 8) * 16);
  }

  // This warpgroup's part of dK or dV goes to HBM by way of `to`. kEveryThread: all commit, also those that have stored
  // nothing.
  template <int kDim, bool kEveryThread = false>
  __device__ __forceinline__ void Leave(const float (&C)[kDim / 2], float scale, uint8_t* to, const Tile& tile,
                                        const TensorMap* map) {
    const int late_lane = LateLane();
#pragma unroll
    for (int c = 0; kTF32 && c < kDim / 8; ++c) {
      const auto scaled = [&](int i) { return __float_as_uint(C[4 * c + i] * scale); };
      Stmatrix(Matrices(to, late_lane, c), scaled(0), scaled(2), scaled(1), scaled(3));
    }
#pragma unroll
    for (int c = 0; !kTF32 && c < kDim / 8; c += 2) {
      const float* x = C + 4 * c;
      const bool whole = c + 1 < kDim / 8;  // or what comes after is outside
      Stmatrix(Matrices(to, late_lane, c / 2), Pack(x[0] * scale, x[1] * scale), Pack(x[2] * scale, x[3] * scale),
               whole ? Pack(x[4] * scale, x[5] * scale) : 0, whole ? Pack(x[6] * scale, x[7] * scale) : 0);
    }
    FenceProxyAsync();
    SyncWarpgroup();
    if (threadIdx.x % kWarpgroup == 0) {
      for (int b = 0; b < Boxes(kDim); ++b)
        TmaStore(map, to + b * kKVBox + first_key * 128, b * kBoxColumns, tile.column + first_key, tile.head,
                 tile.batch);
      if (!kEveryThread) TmaCommit();
    }
    if (kEveryThread) TmaCommit();
  }

  // kWidth columns of 64 rows of dQ, from `column` on. `row_block`: of 64 rows, among those of all heads.
  template <int kWidth>
  struct DQ {
    float C[kWidth > 0 ? kWidth / 2 : 1];
  };

  // If both warpgroups have the same keys: P to the other, when it has read the one before.
  __device__ __forceinline__ void SendP(uint8_t* memory) {
    BarrierSync(kPRead, 2 * kWarpgroup);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      reinterpret_cast<float4*>(memory)[i * kWarpgroup + 32 * warp + lane] =
          make_float4(S[4 * i], S[4 * i + 1], S[4 * i + 2], S[4 * i + 3]);
    }
    BarrierArrive(kPFull, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void ReceiveP(const uint8_t* memory, bool last) {
    BarrierSync(kPFull, 2 * kWarpgroup);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      const float4 x = reinterpret_cast<const float4*>(memory)[i * kWarpgroup + 32 * warp + lane];
      S[4 * i] = x.x, S[4 * i + 1] = x.y, S[4 * i + 2] = x.z, S[4 * i + 3] = x.w;
    }
    if (!last) BarrierArrive(kPRead, 2 * kWarpgroup);
  }

  // dQ in HBM += dQ
  template <int kWidth>
  __device__ __forceinline__ void Add(const DQ<kWidth>& dQ, int row_block, int column) {
    if (kWidth == 0) return;
    float* to = p.dq_sum + int64_t(row_block * 4 + warp) * 16 * kQKDim + 16 * column;
    float* staged =
        reinterpret_cast<float*>(shared.staging) + (row_block % (kRows / 64) * 4 + warp) * 16 * kQKDim + 16 * column;
    TmaWaitRead<0>();
    AddColumns<0, kWidth>(to, dQ.C, staged);
  }

  // To what is in HBM, kWidth columns of this warp's rows of C, by way of shared memory.
  template <int kFirst, int kWidth, int kCount>
  __device__ __forceinline__ void AddColumns(float* to, const float (&C)[kCount], float* staged) {
    SyncWarp();
#pragma unroll
    for (int r = 0; r < kWidth / 8; ++r) {
      const float* x = C + kFirst / 2 + 4 * r;
      reinterpret_cast<float4*>(staged)[r * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
    }
    FenceProxyAsync();
    SyncWarp();
    BulkReduceAdd(lane == 0, to, staged, 16 * kWidth * 4);
    TmaCommit();
  }

  // If kSumKV, this warpgroup's part of dK or dV, from its kBox-th box on: by way of ds and staging in turn, of which
  // kSlot is the first.
  template <int kDim, int kSlot, int kBox = 0>
  __device__ __forceinline__ void AddGradient(const float (&C)[kDim / 2], float* sum, const Tile& tile) {
    constexpr int kFirst = kBox * kBoxColumns, kWidth = kDim - kFirst < kBoxColumns ? kDim - kFirst : kBoxColumns;
    const int consumer_warp = Fresh(threadIdx.x) / 32u - 4;  // computed again, for want of registers
    const int block = (tile.batch * p.kv_heads + tile.head) * KeyBlocksOfHead(p) + tile.column / 64;
    uint8_t* const slot = kSlot == 0 ? reinterpret_cast<uint8_t*>(shared.ds) : shared.staging;
    float* const staged = reinterpret_cast<float*>(slot) + consumer_warp * (16 * kBoxColumns);
    TmaWaitRead<1>();
    AddColumns<kFirst, kWidth>(sum + ((int64_t(block) * 4 + consumer_warp) * kDim + kFirst) * 16, C, staged);
    if constexpr (kFirst + kWidth < kDim) AddGradient<kDim, 1 - kSlot, kBox + 1>(C, sum, tile);
  }

  __device__ __forceinline__ void ReleaseKV() {
    TmaWaitRead<0>();
    FenceProxyAsync();  // K or V may come where P was
    SyncWarp();
    Release(&shared.k_empty);
    Release(&shared.v_empty);
  }
};

}  // namespace jax_flash
