// Hopper forward kernel for head dims above 256. Each CTA keeps 64 rows of Q, and loops over tiles of 64 keys.
//
// Roles. O of 64 rows does not fit into the registers of a warpgroup, so each of two consumer warpgroups has half of
// its columns. They compute S and P of alternate kv tiles, and both need every P:
//   S = Q K_j^T;   m, l, P = online softmax of S;   O = diag(alpha) O + P V_j
// The owner of a tile multiplies P from registers. It also stores P to shared memory and hands it over, with m and l,
// to the other warpgroup. So one warpgroup computes its softmax while the other multiplies.
//
// Shared memory has room for little more than one tile of K and of V. So K arrives box by box, and each box makes room
// for the next one as soon as it has been multiplied. V arrives in halves, one for each warpgroup.
//
// Clusters. 64 rows do too few FLOP for each byte of K and V that the L2 delivers. So two CTAs of a cluster have
// neighbouring rows and visit the same kv tiles. Each loads half of the boxes, for both CTAs (multicast).
//
// Split-KV for latents (kParts): a tile has the rows of all heads, and a CTA computes a part of the keys, which
// ampere/forward_merge.cuh merges. V is a part of K (kVInK): two or more tiles of K stay in shared memory until both
// warpgroups have multiplied by them as V. With up to 64 rows, a CTA is alone.
//
// The loop over K and V runs from right to left. Only tiles at either end of the visible range are masked.
//
// The host launches at most one CTA for each SM, in clusters of kCluster, with kThreads threads and
// `jax_flash_shared_bytes` of shared memory. TMA boxes have 64 rows.
#pragma once

#include "hopper/wide_forward_producer.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper::wide_forward {

constexpr int kQKSteps = (kQKDim + kStep - 1) / kStep;
constexpr int kHalfColumns = kHalfBoxes * kBoxColumns;  // of O, for a warpgroup

// Registers per thread. Their sum over all warpgroups is the kernel's initial allocation. The producer needs more to
// find the tiles that a window and segments leave visible.
constexpr int kProducerRegisters = kWindow && kSegments ? 56 : 40;
constexpr int kConsumerRegisters = (504 - kProducerRegisters) / kConsumers;

// Named barriers. Each name is the first of two: one for each consumer warpgroup. __syncthreads uses 0.
enum NamedBarrier { kWarpgroupBarrier = 1, kHandover = kWarpgroupBarrier + kConsumers };

// A consumer warpgroup. A lane has two of its rows: Row and Row + 8.
struct Consumer {
  const Params& p;
  Shared& shared;
  const int rank = Uniform(ClusterRank());
  const int warpgroup = Uniform(threadIdx.x / kWarpgroup - 1);
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  PackedRing<1> q;
  RingInTurns<kKSlots> k;
  RingInTurns<kVSlots> v;
  int own_k, other_k;         // the first slot of this warpgroup's tile of K, and of the tile before, if kVInK
  int last_v = 0;             // the slot of V of the last product ...
  bool holds_last_v = false;  // ... if it has not been released

  float S[kKeys / 2], O[kHalfColumns / 2];
  uint32_t P[kKeys / 4];
  OnlineSoftmax<2> softmax;

  __device__ __forceinline__ Consumer(const Params& p, Shared& shared) : p(p), shared(shared) {
    softmax.to_log2 = ToLog2(p);
  }

  __device__ __forceinline__ int RowInTile() const { return 16 * warp + lane / 4; }
  __device__ __forceinline__ int FirstRow(const QTile& tile) const { return tile.row + 64 * rank; }
  __device__ __forceinline__ int Row(const QTile& tile) const { return FirstRow(tile) + RowInTile(); }
  __device__ __forceinline__ void SyncWarpgroup() { BarrierSync(kWarpgroupBarrier + warpgroup, kWarpgroup); }

  // Releases a buffer of K or V, in all CTAs that load it.
  __device__ __forceinline__ void Release(uint64_t* barrier, bool elected = true) {
    const bool arrives = ArrivesForWarp(lane) && elected;
    MbarrierArrive(barrier, arrives);
    if constexpr (kCluster > 1) PeerArrive(barrier, arrives);
  }
  __device__ __forceinline__ void ReleaseQ(bool elected) {
    MbarrierArrive(&shared.q_empty, ArrivesForWarp(lane) && elected);
  }
  __device__ __forceinline__ void ReleaseLastV() {
    ReleaseV(last_v, holds_last_v);
    holds_last_v = false;
  }

  // This warpgroup's half of V. A slot is an index of V's ring, or if kVInK the first slot of a tile of K. Take* wait
  // for the tile of this warpgroup, or of the other, and return its slot.
  __device__ __forceinline__ int TakeOwnV() {
    if (kVInK) return own_k;
    v.Wait(shared.v_full[warpgroup]);
    const int slot = v.index;
    v.Next<2>();  // one half is for the other warpgroup
    return slot;
  }
  __device__ __forceinline__ int TakeOtherV() {
    if (kVInK) return other_k;
    v.Next();  // one half is for the other warpgroup
    v.Wait(shared.v_full[warpgroup]);
    const int slot = v.index;
    v.Next();
    return slot;
  }
  __device__ __forceinline__ HalfOfV V(int slot) const {
    return {kVInK ? shared.k[slot + warpgroup * kHalfBoxes] : shared.v[slot]};
  }
  __device__ __forceinline__ void ReleaseV(int slot, bool elected) {
    if (!kVInK) return Release(&shared.v_empty[slot], elected);
#pragma unroll
    for (int b = 0; b < kHalfBoxes; ++b) Release(&shared.k_empty[slot + warpgroup * kHalfBoxes + b], elected);
  }
  // Is box b of K also a box of V, which is released after the product with V?
  __device__ __forceinline__ static constexpr bool IsBoxOfV(int b) { return kVInK && b < 2 * kHalfBoxes; }

  // S = Q K^T, box by box. Afterwards only the last box is in progress, or if kVInK all boxes. Returns the slot of the
  // last box. `done` is called as soon as the products before S are complete.
  template <typename Done>
  __device__ __forceinline__ int IssueS(Done done) {
    const auto a = SharedQ{shared.q}.KMajor();
    int slot = 0;
    own_k = k.index;
#pragma unroll
    for (int b = 0; b < kQKBoxes; ++b, k.Next()) {
      k.Wait(shared.k_full[warpgroup]);
      const auto rows = BoxOfK{shared.k[k.index]}.KMajor();
      WgmmaFence();
#pragma unroll
      for (int d = 0; d < 4 && 4 * b + d < kQKSteps; ++d)
        Wgmma<kKeys>::template SS<Major::kK, Major::kK>(S, a.KStep(d, b), rows.KStep(d), b > 0 || d > 0);
      WgmmaCommit();
      if (b == 0) done();
      if (b > 0 && !IsBoxOfV(b - 1)) {
        WgmmaWait<1>();  // until the box before is done
        Release(&shared.k_empty[slot]);
      }
      slot = k.index;
    }
    return slot;
  }

  // O += P V, with P from registers.
  __device__ __forceinline__ void IssueO() {
    last_v = TakeOwnV(), holds_last_v = true;
    const auto b = V(last_v).MNMajor();
    WgmmaFence();
#pragma unroll
    for (int c = 0; c < kKeys / kStep; ++c)
      Wgmma<kHalfColumns>::template RS<Major::kMN>(O, P + 4 * c, b.KStep(c), true);
    WgmmaCommit();
  }

  // The same for the other warpgroup's tile: takes its softmax, and P from shared memory. O must not be in use. Returns
  // the slot of V.
  __device__ __forceinline__ int IssueOtherO() {
    BarrierSync(kHandover + 1 - warpgroup, kConsumers * kWarpgroup);
    float alpha[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = RowInTile() + 8 * h;
      const float reference = shared.reference[row];
      alpha[h] = reference == softmax.reference[h] ? 1.0f : Exp2((softmax.reference[h] - reference) * softmax.to_log2);
      softmax.m[h] = shared.m[row], softmax.reference[h] = reference;
      softmax.l[h] = shared.l[h][threadIdx.x % kWarpgroup];
    }
    Rescale(alpha);
    const int slot = TakeOtherV();
    const auto a = SharedP{shared.p}.KMajor();
    const auto b = V(slot).MNMajor();
    WgmmaFence();
#pragma unroll
    for (int c = 0; c < kKeys / kStep; ++c)
      Wgmma<kHalfColumns>::template SS<Major::kK, Major::kMN>(O, a.KStep(c), b.KStep(c), true);
    WgmmaCommit();
    return slot;
  }

  __device__ __forceinline__ void SkipOtherK() {
    other_k = k.index;
    k.Next<kQKBoxes>();
  }

  __device__ __forceinline__ void Rescale(const float (&alpha)[2]) {
    if (!__any_sync(0xFFFFFFFFu, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
    Pin(O);
#pragma unroll
    for (int i = 0; i < kHalfColumns / 2; ++i) O[i] *= alpha[i / 2 % 2];
  }

  // Turns S into scores but for their factor, which the exponent applies, and sets masked entries to -inf.
  template <bool kMasked>
  __device__ __forceinline__ void ToScores(const QTile& tile, int j) {
    SoftCapTanh(p, S);
    if (!kMasked) return;
    Positions positions = PositionsOf(p, tile.batch);
    if (!kProblem.q_lengths && !kProblem.ranges) positions.q_length = int64_t(1) << 32;  // rows beyond T are not stored
    const View<false> view = {Row(tile), j * kKeys + lane % 4 * 2};
    if constexpr (kMasksInMemory) {
      TileMask<false, kKeys> mask;
      mask.Intersect(positions, Entries(p, tile.batch, tile.head), view);
      mask.Apply(S);
    } else {
      MaskOutside(positions, view, S);
    }
  }

  // Gives P and the softmax to the other warpgroup.
  __device__ __forceinline__ void HandOver() {
    uint8_t* const rows = shared.p + 16 * warp * kBoxBytes;
#pragma unroll
    for (int c = 0; c < kKeys / kStep; ++c)
      Stmatrix(MatricesOf(rows, lane, c), P[4 * c], P[4 * c + 1], P[4 * c + 2], P[4 * c + 3]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = RowInTile() + 8 * h;
      if (lane % 4 == 0) shared.m[row] = softmax.m[h], shared.reference[row] = softmax.reference[h];
      shared.l[h][threadIdx.x % kWarpgroup] = softmax.l[h];
    }
    FenceProxyAsync();
    BarrierArrive(kHandover + warpgroup, kConsumers * kWarpgroup);
  }

  // Adds tile j, after the other warpgroup's tile on its right, unless it is the first. Numbers are lines of
  // Algorithm 2.
  template <bool kMasked>
  __device__ __forceinline__ void AddTile(const QTile& tile, int j, bool first, bool last) {
    if (!first) SkipOtherK();
    WgmmaWait<0>();
    Pin(O);
    ReleaseLastV();
    // Line 15 for the other tile comes after S, so that softmax overlaps with it. But if kVInK, the next tile of K can
    // arrive only now, and it comes before S.
    int other_v = 0;
    if (kVInK && !first) other_v = IssueOtherO();
    const int last_box = IssueS([&] {  // 10
      if (!kVInK) return;
      WgmmaWait<1>();
      Pin(O);
      ReleaseV(other_v, !first);
    });
    if (kVInK || first) {
      WgmmaWait<0>();
    } else {
      other_v = IssueOtherO();
      WgmmaWait<1>();
    }
    Pin(S);
    if (!IsBoxOfV(kQKBoxes - 1)) Release(&shared.k_empty[last_box]);
    ReleaseQ(last);
    ToScores<kMasked>(tile, j);  // 11
    float alpha[2], shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // 12, 13
      alpha[h] = softmax.Maximum(S, h) ? softmax.Rescale(h) : 1.0f;
      shift[h] = softmax.Shift(h);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) softmax.Exponentials(S, h, shift[h]);
    if (!kVInK) {
      WgmmaWait<0>();
      Pin(O);
      ReleaseV(other_v, !first);
    }
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) P[i] = Pack(S[2 * i], S[2 * i + 1]);
    HandOver();
    Rescale(alpha);
    IssueO();  // 15
  }

  // Computes a tile of O: one iteration of line 8, with the loop of line 6 inside. Returns false at the end.
  __device__ __forceinline__ bool ComputeOTile(const TensorMap* o_map) {
    SyncWarp();  // all lanes have read the previous tile
    MbarrierWait(&shared.q_full, q.Parity());
    const QTile& tile = shared.tile[q.position];  // it stays in shared memory to save registers
    const int begin = kLocal || kParts ? Uniform(tile.visible.any_lo) : 0, end = Uniform(tile.visible.any_hi);
    const int unmasked_begin = kLocal ? Uniform(tile.visible.every_lo) : 0;
    const int unmasked_end = Uniform(tile.visible.every_hi);
    if (begin == end) {
      if (tile.row < 0) return false;  // after the last tile, whose range is empty, too
      if (kParts) {
        WriteEmptyPart(tile, shared.part[q.position]);
      } else {
        WriteEmpty(tile);
      }
      SyncWarp();
      ReleaseQ(true);
      return true;
    }
    softmax.Start();
#pragma unroll
    for (int i = 0; i < kHalfColumns / 2; ++i) O[i] = 0.0f;
    int j = Uniform(shared.owner[q.position]) == warpgroup ? end - 1 : end - 2;
    if (j < begin) ReleaseQ(true);
    for (; j >= begin; j -= 2) {
      if (j >= unmasked_end || j < unmasked_begin) {
        AddTile<true>(tile, j, j == end - 1, j - 2 < begin);
      } else {
        AddTile<false>(tile, j, j == end - 1, j - 2 < begin);
      }
    }
    WgmmaWait<0>();
    if (j + 1 == begin) {  // the last tile is the other warpgroup's
      ReleaseLastV();
      SkipOtherK();
      last_v = IssueOtherO(), holds_last_v = true;
      WgmmaWait<0>();
    }
    Pin(O);
    if (kParts) {
      WritePart(tile, shared.part[q.position]);
    } else {
      Write(tile, o_map);
    }
    return true;
  }

  // Writes O = diag(l)^-1 O, l and m. O leaves through the memory of V.
  __device__ __forceinline__ void Write(const QTile& tile, const TensorMap* o_map) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax.Finish(h);
      const float l = softmax.Denominator(p, tile.batch, tile.head, h);
      factor[h] = softmax.l[h] == 0.0f ? 0.0f : Reciprocal(l);
    }
    const SharedTile<64, kHalfBoxes> o{shared.v[last_v]};
    SyncWarpgroup();  // all warps have multiplied by V
#pragma unroll
    for (int i = 0; i < kHalfColumns / kStep; ++i) {
      const float* const x = O + i * kStep / 2;
      Stmatrix(MatricesOf(o.Box(i / 4) + 16 * warp * kBoxBytes, lane, i % 4), Pack(x[0] * factor[0], x[1] * factor[0]),
               Pack(x[2] * factor[1], x[3] * factor[1]), Pack(x[4] * factor[0], x[5] * factor[0]),
               Pack(x[6] * factor[1], x[7] * factor[1]));
    }
    FenceProxyAsync();
    SyncWarpgroup();
    if (threadIdx.x % kWarpgroup == 0) {
      for (int b = 0; b < kHalfBoxes; ++b) {
        const int column = (warpgroup * kHalfBoxes + b) * kBoxColumns;
        if (column < kVDim) TmaStore(o_map, o.Box(b), column, FirstRow(tile), tile.head, tile.batch);
      }
      TmaCommit();
      TmaWaitRead<0>();
    }
    ReleaseLastV();
    if (warpgroup == 0) WriteStatistics(tile);
  }

  __device__ __forceinline__ int64_t RowIndex(const QTile& tile, int row) const {
    return (int64_t(tile.batch) * p.q_heads + tile.head) * p.q_len + row;
  }

  __device__ __forceinline__ void WriteStatistics(const QTile& tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = Row(tile) + 8 * h;
      if (lane % 4 > 0 || row >= p.q_len) continue;
      p.m[RowIndex(tile, row)] = softmax.RowMaximum(p, h), p.l[RowIndex(tile, row)] = softmax.RowSum(h);
    }
  }

  // Split-KV: the index of a row in the arrays of parts. Row r of a tile is query r / kPacked of head r % kPacked.
  __device__ __forceinline__ int64_t PartIndex(const QTile& tile, int part, int row) const {
    return ((int64_t(part) * p.batch + tile.batch) * p.q_heads + row % kPacked) * p.q_len + row / kPacked;
  }

  // Writes O, l and m of a part of the keys.
  __device__ __forceinline__ void WritePart(const QTile& tile, int part) {
    ReleaseLastV();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax.Finish(h);
      const int row = Row(tile) + 8 * h;
      if (row >= p.q_len * kPacked) continue;
      const int64_t at = PartIndex(tile, part, row);
      if (warpgroup == 0 && lane % 4 == 0) p.l_parts[at] = softmax.RowSum(h), p.m_parts[at] = softmax.m[h];
      const float factor = softmax.l[h] == 0.0f ? 0.0f : Reciprocal(softmax.l[h]);
      float* const to = p.o_parts + at * kVDim;
#pragma unroll
      for (int c = 0; c < kHalfColumns / 8; ++c) {
        const int column = warpgroup * kHalfColumns + 8 * c + lane % 4 * 2;
        const float* const x = O + 4 * c + 2 * h;
        if (column < kVDim) *reinterpret_cast<float2*>(to + column) = make_float2(x[0] * factor, x[1] * factor);
      }
    }
  }

  // The same if no row sees a key.
  __device__ __forceinline__ void WriteEmptyPart(const QTile& tile, int part) {
    const int thread = threadIdx.x - kWarpgroup, row0 = FirstRow(tile), rows = min(64, p.q_len * kPacked - row0);
    if (thread < rows) {
      const int64_t at = PartIndex(tile, part, row0 + thread);
      p.l_parts[at] = 0.0f, p.m_parts[at] = -Infinity();
    }
#pragma unroll 1
    for (int i = thread; i < rows * kVDim; i += kConsumers * kWarpgroup)
      p.o_parts[PartIndex(tile, part, row0 + i / kVDim) * kVDim + i % kVDim] = 0.0f;
  }

  // Writes O, l and m of a tile in which all rows are fully masked.
  __device__ __forceinline__ void WriteEmpty(const QTile& tile) {
    constexpr int kChunks = kVDim * kElementBytes / 16;  // in a row
    const int thread = threadIdx.x - kWarpgroup, row0 = FirstRow(tile), rows = min(64, p.q_len - row0);
    if (thread < rows) p.l[RowIndex(tile, row0 + thread)] = 0.0f, p.m[RowIndex(tile, row0 + thread)] = -Infinity();
    uint4* const o =
        static_cast<uint4*>(p.o) + ((int64_t(tile.batch) * p.q_len + row0) * p.q_heads + tile.head) * kChunks;
#pragma unroll 1
    for (int i = thread; i < rows * kChunks; i += kConsumers * kWarpgroup)
      o[int64_t(i / kChunks) * p.q_heads * kChunks + i % kChunks] = {0, 0, 0, 0};
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    jax_flash_forward(const __grid_constant__ KernelParams p JAX_FLASH_FORWARD_MAPS(JAX_FLASH_MAP)) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    constexpr uint32_t kByWarpgroups = ArrivalsOf(4 * kCluster);  // one warpgroup of each CTA
    MbarrierInit(&shared.q_full, 1);
    MbarrierInit(&shared.q_empty, ArrivalsOf(4 * kConsumers) + !kVInK);  // the consumers, and the producer of V
    for (int w = 0; w < kConsumers; ++w) {
      for (int s = 0; s < kKSlots; ++s) MbarrierInit(&shared.k_full[w][s], 1);
      for (int s = 0; s < kVSlots; ++s) MbarrierInit(&shared.v_full[w][s], 1);
    }
    for (int s = 0; s < kKSlots; ++s) MbarrierInit(&shared.k_empty[s], kByWarpgroups);
    for (int s = 0; s < kVSlots; ++s) MbarrierInit(&shared.v_empty[s], kByWarpgroups);
    shared.owner[0] = 0;
    if (kProblem.kv_lengths) shared.uncleared.Init();
    FenceMbarrierInit();
  }
  ClusterSync();
  if (threadIdx.x < kWarpgroup) {
    SetMaxRegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      ProducerOfQK{p, shared, &query_map, &key_map}.Run();
    } else if (!kVInK && threadIdx.x == 32) {
      ProducerOfV{p, shared, kProblem.latent ? &key_map : &value_map}.Run();
    }
  } else {
    SetMaxRegistersUp<kConsumerRegisters>();
    Consumer consumer(p, shared);
    while (consumer.ComputeOTile(&o_map)) consumer.q.Next();
  }
  ClusterSync();  // the other CTA may still write to this one's shared memory
}

}  // namespace jax_flash::hopper::wide_forward
