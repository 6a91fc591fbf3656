// Hopper tangent pass: the tangent of O, and of l if it is a result, from Q, K, V, the results of the forward, and the
// tangents Q̇, K̇ and V̇. Each CTA keeps one tile of Q and loops over tiles of K and V from right to left, as the forward
// does.
//
// Roles: one thread of the producer warpgroup loads tiles by TMA. Each consumer warpgroup has 64 rows. The forward has
// computed m and l, so there is no online softmax, and nothing is rescaled:
//   S = Q K_j^T;   Ṡ = Q K̇_j^T + Q̇ K_j^T;   E = exp(S - m)
//   A += Z E V̇_j + Z E (Ṡ - r) V_j;   mu += rowsum(E (Ṡ - r))
// At the end Ȯ = (A - mu O) / l without dropout and sinks, and the tangent of l is mu + l r. With dropout, A has to be
// multiplied by 1 / keep, and a sink adds its own term to mu: TangentOfRow in semantics/tangent.cuh. A sums rounded
// terms. So Ȯ takes mu as the sum of the same rounded terms, and their errors can cancel. Columns of ones after V give
// this sum (kSumsInA). The tangent of l takes the f32 sum (mu). Most programs do not use it, and the kernel is then
// compiled without it.
//
// The reference r is one number for each row, close to the mean of Ṡ over the keys that the row sees. Ȯ is the same for
// any r, because a change of r changes A and mu O equally. But E (Ṡ - r) is rounded to 16 bits. With r = 0, a large and
// nearly constant Ṡ would have large rounding errors, and Ȯ would be a small difference of large numbers.
//
// Overlap: the tensor cores always have work. Ṡ follows S, so E is computed meanwhile. E V̇ follows Ṡ, so E (Ṡ - r) is
// computed meanwhile. The next S follows E (Ṡ - r) V. Nobody waits for A before the next S is ready.
//
// Q is in registers, so that wgmma reads only K from shared memory. Otherwise both operands of three products would be
// read from there, which takes as long as the products (docs/design/tangent.md).
//
// Operands without a tangent cost neither loads nor products. If only V has a tangent, there are two products.
//
// The host launches at most one CTA for each multiprocessor, with kThreads threads and `jax_flash_shared_bytes` of
// shared memory. Boxes have kBoxRows rows in the tensor maps of Q and Q̇, and kKeys rows in the others.
#pragma once

#include "hopper/tangent_producer.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"

namespace jax_flash::hopper::tangent {

constexpr int kQKSteps = (kQKDim + kStep - 1) / kStep;

// Named barriers, each the first of several: one for each consumer warpgroup. __syncthreads uses 0.
enum NamedBarrier { kTurnBarrier = 1 };

// A consumer warpgroup. A lane has two of its rows: Row and Row + 8.
struct Consumer {
  const TangentParams& p;
  Shared& shared;
  const int warpgroup, warp, lane;
  Ring<kStages> k, v;
  PackedRing<kQBuffers> q;

  float S[kKeys / 2], S_dot[kKeys / 2], A[kAColumns / 2];  // E takes the place of S
  uint32_t E[kKeys / 4], E_dot[kKeys / 4];                 // Z E and Z E (Ṡ - r) as left operands
  uint32_t Q[kQKSteps][4];                                 // left operands
  float minus_m[2], reference[2], mu[2];
  float rounded_mu[4];      // unless kSumsInA: the same sums as mu, of rounded terms; two copies for each row
  bool lacks_reference[2];  // may it still be set?
  const float to_log2, scale;
  PackedZ<kKeys> z;
  TileMask<false, kKeys> tile_mask;

  __device__ __forceinline__ Consumer(const TangentParams& p, Shared& shared)
      : p(p),
        shared(shared),
        warpgroup(Uniform(threadIdx.x / kWarpgroup - 1)),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        to_log2(ToLog2(p)),
        scale(ScaleOf(p)) {
    if (warpgroup == kConsumers - 1) PassTurn();  // the first warpgroup begins
  }

  __device__ __forceinline__ int Row(const QTile& tile) const {
    return tile.row + 64 * warpgroup + 16 * warp + lane / 4;
  }
  __device__ __forceinline__ View<false> ViewOf(const QTile& tile, int j) const {
    return {Row(tile), j * kKeys + lane % 4 * 2};
  }
  __device__ __forceinline__ int Buffer() const { return q.Index() * kConsumers + warpgroup; }
  __device__ __forceinline__ void Release(uint64_t* barrier, bool elected = true) {
    MbarrierArrive(barrier, ArrivesForWarp(lane) && elected);
  }
  __device__ __forceinline__ void TakeTurn() { BarrierSync(kTurnBarrier + warpgroup, 2 * kWarpgroup); }
  __device__ __forceinline__ void PassTurn() {
    BarrierArrive(kTurnBarrier + (warpgroup + 1) % kConsumers, 2 * kWarpgroup);
  }

  __device__ __forceinline__ void TakeQ() {
    const SharedQ rows{shared.q[Buffer()] + 16 * warp * kBoxBytes};
    const int fresh_lane = Opaque(lane);
#pragma unroll
    for (int d = 0; d < kQKSteps; ++d) Ldmatrix(Q[d], rows.Matrices(fresh_lane, d));
    FenceProxyAsync();  // before the next Q comes
  }

  // C = Q B^T.
  __device__ __forceinline__ void IssueQTimes(float (&C)[kKeys / 2], uint8_t* rows) {
    const auto b = SharedK{rows}.KMajor();
#pragma unroll
    for (int d = 0; d < kQKSteps; ++d) Wgmma<kKeys>::template RS<Major::kK>(C, Q[d], b.KStep(d), d > 0);
  }

  // S = Q K^T, and Ṡ = Q K̇^T + Q̇ K^T.
  __device__ __forceinline__ void IssueScores() {
    WgmmaFence();
    IssueQTimes(S, shared.k[k.index]);
    WgmmaCommit();
    if (!kScoresMove) return;
    WgmmaFence();
    if (kKeyMoves) IssueQTimes(S_dot, shared.k_tangent[k.index]);
    if constexpr (kQueryMoves) {
      const auto a = SharedQ{shared.q_tangent[Buffer()]}.KMajor();
      const auto b = SharedK{shared.k[k.index]}.KMajor();
#pragma unroll
      for (int d = 0; d < kQKSteps; ++d)
        Wgmma<kKeys>::template SS<Major::kK, Major::kK>(S_dot, a.KStep(d), b.KStep(d), kKeyMoves || d > 0);
    }
    WgmmaCommit();
  }

  // A += X V, or with V̇, in the first kColumns columns.
  template <int kColumns>
  __device__ __forceinline__ void IssueA(const uint32_t (&X)[kKeys / 4], uint8_t* rows) {
    WgmmaFence();
    auto& sums = reinterpret_cast<float (&)[kColumns / 2]>(A);
    const auto b = SharedV{rows}.MNMajor();
#pragma unroll
    for (int c = 0; c < kKeys / kStep; ++c) Wgmma<kColumns>::template RS<Major::kMN>(sums, X + 4 * c, b.KStep(c), true);
    WgmmaCommit();
  }

  // Begins to load the masks of this lane's rows in tile j, if they are in memory.
  template <bool kMasked>
  __device__ __forceinline__ void FetchMasks(const QTile& tile, int j) {
    if (!kMasked || !kMasksInMemory) return;
    const Block<false> block(p.block_mask, kListed ? shared.listed[k.index].elements : kAllElements);
    tile_mask.FetchBlock(block, Row(tile), j * kKeys);
  }

  // Turns q_i k_j into s_ij but for its factor, which goes into the exponent, and hides masked entries.
  template <bool kMasked>
  __device__ __forceinline__ void ToScores(const QTile& tile, int j, bool only_element_mask) {
    if (kSoftCap) {
      SoftCapTanh(p, S);
#pragma unroll
      for (int i = 0; kScoresMove && i < kKeys / 2; ++i) S_dot[i] *= SlopeOf(S[i]);
    }
    if (!kMasked) return;
    Positions positions = PositionsOf(p, tile.batch);
    if (!kProblem.q_lengths && !kProblem.ranges) positions.q_length = int64_t(1) << 32;  // rows beyond T are not stored
    if constexpr (kMasksInMemory) {
      tile_mask.PackBits();
      if (!only_element_mask) tile_mask.Intersect(positions, Entries(p, tile.batch, tile.head), ViewOf(tile, j));
      tile_mask.Apply(S);
    } else {
      MaskOutside(positions, ViewOf(tile, j), S);
    }
  }

  // Turns S into E, and packs Z E.
  __device__ __forceinline__ void ToE() {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) S[i] = Exp2(fmaf(S[i], to_log2, minus_m[i / 2 % 2]));
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) E[i] = Pack(S[2 * i], S[2 * i + 1]);
    z.Apply(E);
  }

  // The tangent of a score. Where E is 0 it may be NaN: a key beyond kv_length may be anything.
  __device__ __forceinline__ float Moved(int i) const {
    return kProblem.kv_lengths && S[i] == 0.0f ? 0.0f : S_dot[i] * scale;
  }

  // The reference of each row: the mean of Ṡ over the first tile in which E is not 0, weighted by E. Only masked tiles
  // look for it. The first tile is one of them, and so are others until every row has seen a key. A vote that spares
  // the search would be a branch, across which no product may be at work.
  __device__ __forceinline__ void SetReferences() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float weight = 0.0f, sum = 0.0f;
#pragma unroll
      for (int x = 0; x < kKeys / 4; ++x) {
        const int i = x / 2 * 4 + 2 * h + x % 2;
        weight += S[i], sum = fmaf(S[i], Moved(i), sum);
      }
      weight = LaneSum<4>(weight), sum = LaneSum<4>(sum);
      if (lacks_reference[h] && weight > 0.0f) reference[h] = sum * Reciprocal(weight), lacks_reference[h] = false;
    }
  }

  // Packs Z E (Ṡ - r), and adds E (Ṡ - r) to the sums.
  template <bool kMasked>
  __device__ __forceinline__ void ToEDot() {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int h = i / 2 % 2;
      S_dot[i] = S[i] * (kMasked ? Moved(i) - reference[h] : fmaf(S_dot[i], scale, -reference[h]));
      if (kLTangent) mu[h] += S_dot[i];
    }
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) E_dot[i] = Pack(S_dot[2 * i], S_dot[2 * i + 1]);
    z.Apply(E_dot);
    if (kSumsInA) return;
    // A product with ones sums the rounded terms. Its operand is packed anew, with the elements of a pair exchanged: if
    // it shared registers with E_dot, ptxas would serialise all wgmmas.
    const uint32_t one = Pack(1.0f, 1.0f), ones[2] = {one, one};
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 8) {
      uint32_t pairs[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) pairs[k] = Pack(S_dot[i + 2 * k + 1], S_dot[i + 2 * k]);
      MmaSync(rounded_mu, pairs, ones);
    }
  }

  // With a block mask: waits for the next tile of K, and returns which one it is.
  __device__ __forceinline__ ListedTile Listed() {
    MbarrierWait(&shared.k_full[k.index], k.parity);
    return {Uniform(shared.listed[k.index].word)};
  }

  // Adds tile j of K and V. only_element_mask: the tile has no mask but the element mask of its block. The products for
  // A may still be at work when it returns.
  template <bool kMasked, bool kFirst>
  __device__ __forceinline__ void AddTile(const QTile& tile, int j, bool last, bool only_element_mask = false) {
    FetchMasks<kMasked>(tile, j);
    if (!kListed) MbarrierWait(&shared.k_full[k.index], k.parity);  // before the turn, which others wait for
    TakeTurn();
    IssueScores();
    PassTurn();
    z.Generate(p, Row(tile), j * kKeys);
    WgmmaWait<kScoresMove && !kSoftCap ? 1 : 0>();  // for S, and for the products for A of the previous tile
    Pin(S);
    if (kSoftCap && kScoresMove) Pin(S_dot);
    if (!kFirst) Release(&shared.v_empty[v.Before().index]);
    ToScores<kMasked>(tile, j, only_element_mask);
    ToE();
    MbarrierWait(&shared.v_full[v.index], v.parity);
    if (kValueMoves) IssueA<kVDim>(E, shared.v_tangent[v.index]);
    if constexpr (kScoresMove) {
      WgmmaWait<kValueMoves ? 1 : 0>();
      Pin(S_dot);
    }
    Release(&shared.k_empty[k.index]);
    Release(&shared.q_empty[q.Index()][warpgroup], last);
    k.Next();
    if constexpr (kScoresMove) {
      if (kMasked) SetReferences();
      ToEDot<kMasked>();
      if (kSumsInA && kValueMoves) WgmmaWait<0>(), Pin(A);  // wgmmas of different shapes may not overlap
      IssueA<kAColumns>(E_dot, shared.v[v.index]);
    }
    v.Next();
  }

  // Computes one tile. Returns false if the producer has no more.
  __device__ __forceinline__ bool ComputeTile() {
    SyncWarp();  // all lanes have read the previous tile, before q_empty is signalled
    MbarrierWait(&shared.q_full[q.Index()][warpgroup], q.Parity());
    // The tile stays in shared memory to save registers. Only the bounds of the loop are in registers. There are two
    // places for each buffer of Q, by `position`, as the buffer is released before the results of its tile are written.
    const QTile& tile = shared.tile[q.position][warpgroup];
    const int begin = kLocal || kListed ? Uniform(tile.visible.any_lo) : 0, end = Uniform(tile.visible.any_hi);
    const int unmasked_begin = kLocal ? Uniform(tile.visible.every_lo) : 0;
    const int unmasked_end = Uniform(tile.visible.every_hi);
    if (begin == end) {
      if (tile.row < 0) return false;
      SyncWarp();
      WriteEmpty(tile);
      Release(&shared.q_empty[q.Index()][warpgroup]);
      return true;
    }
    TakeQ();
    z.Start(p, tile.batch, tile.head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = Row(tile) + 8 * h;
      minus_m[h] = row < p.q_len ? MinusMOfRow(p, RowIndex(tile, row)) : -Infinity();
      reference[h] = mu[h] = 0.0f;
      lacks_reference[h] = minus_m[h] != -Infinity();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded_mu[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kAColumns / 2; ++i) A[i] = 0.0f;
    if constexpr (kListed) {  // Algorithm 5, line 8: skip empty blocks
      ListedTile listed = Listed();
      AddTile<true, true>(tile, listed.J(), listed.Last(), listed.OnlyElementMask());
      while (!listed.Last()) {
        listed = Listed();
        if (listed.Masked()) {
          AddTile<true, false>(tile, listed.J(), listed.Last(), listed.OnlyElementMask());
        } else {  // adds terms with the present r and does not look for one, so r must not change any more
          lacks_reference[0] = lacks_reference[1] = false;
          AddTile<false, false>(tile, listed.J(), listed.Last());
        }
      }
    } else {
      int j = end - 1;
      AddTile<true, true>(tile, j, j == begin);
      for (--j; j >= unmasked_end; --j) AddTile<true, false>(tile, j, j == begin);
      if (kLocal && j >= unmasked_begin) lacks_reference[0] = lacks_reference[1] = false;
      for (; j >= unmasked_begin; --j) AddTile<false, false>(tile, j, j == begin);
      if (kLocal) {
        for (; j >= begin; --j) AddTile<true, false>(tile, j, j == begin);
      }
    }
    WgmmaWait<0>();
    Pin(A);
    Release(&shared.v_empty[v.Before().index]);
    Write(tile);
    return true;
  }

  // --- Results ---

  // The index of a row in arrays [batch, head, row], and in arrays [batch, row, head].
  __device__ __forceinline__ int64_t RowIndex(const QTile& tile, int row) const {
    return (int64_t(tile.batch) * p.q_heads + tile.head) * p.q_len + row;
  }
  __device__ __forceinline__ int64_t OutputIndex(const QTile& tile, int row) const {
    return (int64_t(tile.batch) * p.q_len + row) * p.q_heads + tile.head;
  }

  // Writes Ȯ = (A - mu O) / l, and the tangent of l.
  __device__ __forceinline__ void Write(const QTile& tile) {
    const float* const rounded = kSumsInA ? A + kVDim / 2 : rounded_mu;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = Row(tile) + 8 * h;
      if (kLTangent) mu[h] = LaneSum<4>(mu[h]);
      if (row >= p.q_len) continue;
      const TangentOfRow results(p, tile.batch, tile.head, RowIndex(tile, row), mu[h], rounded[2 * h], reference[h]);
      if (kLTangent && lane % 4 == 0) p.l_tangent[RowIndex(tile, row)] = results.l;
      const int64_t at = OutputIndex(tile, row) * (kVDim / 2) + lane % 4;
      const float2* const o = static_cast<const float2*>(p.o) + at;
      uint32_t* const to = static_cast<uint32_t*>(p.o_tangent) + at;
#pragma unroll
      for (int c = 0; c < kVDim / 8; ++c) {
        const float2 x = o[4 * c];
        const float* a = A + 4 * c + 2 * h;
        to[4 * c] = Pack(results.Of(a[0], x.x), results.Of(a[1], x.y));
      }
    }
  }

  // Writes zeros for a tile whose rows are all fully masked.
  __device__ __forceinline__ void WriteEmpty(const QTile& tile) {
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const int row = Row(tile) + 8 * h;
      if (row >= p.q_len) continue;
      if (kLTangent && lane % 4 == 0) p.l_tangent[RowIndex(tile, row)] = 0.0f;
      uint32_t* const to = static_cast<uint32_t*>(p.o_tangent) + OutputIndex(tile, row) * (kVDim / 2) + lane % 4;
#pragma unroll 1
      for (int c = 0; c < kVDim / 8; ++c) to[4 * c] = 0;
    }
  }
};

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_flash_tangent(const __grid_constant__ TangentParams p JAX_FLASH_TANGENT_MAPS(JAX_FLASH_MAP)) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int b = 0; b < kQBuffers; ++b) {
      for (int w = 0; w < kConsumers; ++w)
        MbarrierInit(&shared.q_full[b][w], 1), MbarrierInit(&shared.q_empty[b][w], ArrivalsOf(4));
    }
    for (int s = 0; s < kStages; ++s) {
      MbarrierInit(&shared.k_full[s], 1), MbarrierInit(&shared.k_empty[s], ArrivalsOf(4 * kConsumers));
      MbarrierInit(&shared.v_full[s], 1), MbarrierInit(&shared.v_empty[s], ArrivalsOf(4 * kConsumers));
    }
    if (kProblem.kv_lengths) shared.uncleared.Init();
    FenceMbarrierInit();
  }
  if (kSumsInA) {
    const uint32_t one = Pack(1.0f, 1.0f);
    for (int s = 0; s < kStages; ++s) {
      for (int i = threadIdx.x; i < kOnesBytes / 4; i += kThreads)
        reinterpret_cast<uint32_t*>(shared.v[s] + SharedV::kBytes)[i] = one;
    }
    FenceProxyAsync();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    SetMaxRegistersDown<Tuning::kProducerRegisters>();
    if (threadIdx.x == 0)
      Producer{p, shared, &query_map, &key_map, &value_map, &query_tangent_map, &key_tangent_map, &value_tangent_map}
          .Run();
  } else {
    SetMaxRegistersUp<Tuning::kConsumerRegisters>();
    Consumer consumer(p, shared);
    while (consumer.ComputeTile()) consumer.q.Next();
  }
}

}  // namespace jax_flash::hopper::tangent
