// The forward for Hopper: Algorithm 2 of the paper with its loops exchanged. A CTA keeps a tile of Q and walks K and V.
//
// One thread of the producer warpgroup loads tiles by TMA. Each consumer warpgroup has 64 rows of Q and O:
//   S = Q K_j^T;   m, l, P = online softmax of S;   O = diag(alpha) O + P V_j
// S of the next tile is issued together with P V, so that the tensor cores work while the softmax runs; and the
// warpgroups take turns in issuing, so that one's softmax runs under the other's products. K and V are walked from
// right to left, and only the tiles at either end of what the rows see are masked. With a block mask, whose blocks are
// whole tiles, a thread of the producer's goes through the list of the blocks that there are, and consumers are told.
//
// Where the rows are too few for all warpgroups, half of these take the first half of the keys of each tile, half the
// second, and what they have is merged at the end.
//
// f32 is taken as TF32: the copy engine rounds Q, K and V, as their maps say. There Q is held in registers, for the
// sake of shared memory's bandwidth, and V lands box by box and is transposed by the other warps of the producer's.
//
// Tiles of S have kRows (a multiple of 64) and kKeys (of 16, or 32 for f32); there are 2, 3 or 4 consumers, one or two
// for 64 rows. The host launches at most one CTA a multiprocessor, of kThreads and `jax_flash_shared_bytes`, with boxes
// of kBoxRows in the maps of Q and O and of kKeys in those of K and V. What is beyond the head dim arrives as zeros,
// and is left out of O.
#pragma once

#include "hopper/forward_tiles.cuh"
#include "ptx/wgmma.cuh"
#include "semantics/philox.cuh"
#include "semantics/score.cuh"

namespace jax_flash {

constexpr int kQKSteps = (kQKDim + kStep - 1) / kStep;
constexpr bool kMaskedLeft = kWindow || kSegments;  // keys may be hidden to the left of what is not
// Is the first tile to be computed, the last that the rows see, masked at any rate? (To ask takes registers that with
// segments are not there for wide heads or TF32, and with dropout and narrow heads more time than it saves.)
constexpr bool kFirstMasked =
    kMask ||
    (!kBlockMask && (kCausal || kWindow || (kSegments && (kTF32 || kVDim > 128)) || (kDropout && kVDim <= 64)));
constexpr bool kLookedUp = kSegments || kMask || kBlockMask;   // must memory be asked which keys a row sees?
constexpr int kSeenWords = kLookedUp ? (kCols + 31) / 32 : 1;  // a bit for each key of a tile
// Do the warps ask whether their rows see all of a masked tile? They often do where others do not, and of a block that
// a window crosses a warpgroup's half of the keys may be whole. (With segments and dropout that costs more than it
// saves.)
constexpr bool kVote = (kSegments ? !kDropout : kBlockMask) && kCols % 32 == 0;

// Named barriers of row groups.
constexpr int kHanded = 1 + 2 * kConsumers, kFree = kHanded + kRowGroups;

// What one consumer warpgroup has: 64 rows, and all keys of a tile or half of them. A lane holds two of them, Row and
// Row + 8.
struct Consumer {
  const Params& p;
  ForwardShared& shared;
  const int warpgroup, row_group, key_group, warp, lane;
  const float to_log2;  // from S to exponents of 2
  Ring<kStages> k, v;
  PackedRing<kQBuffers> q;

  float S[kCols / 2], O[kVDim / 2];
  uint32_t P[kCols / kStep * 4], Q[kTF32 ? kQKSteps : 1][4];  // left operands; Q of f32
  uint32_t seed[4];                                           // with the head's and the batch entry's id
  uint32_t kept[kCols / 4];      // of two entries all bits of their halves, or none: what dropout leaves
  uint32_t seen[2][kSeenWords];  // of a tile, from the lane's first column on
  float m[2], l[2];              // l: of this lane's columns only, until the end
  float reference[2];            // what the exponentials are taken against: m, or a little less

  __device__ __forceinline__ Consumer(const Params& p, ForwardShared& shared)
      : p(p),
        shared(shared),
        warpgroup(__shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarpgroup, 0) - 1),
        row_group(kKeyGroups > 1 ? warpgroup % kRowGroups : warpgroup),
        key_group(kKeyGroups > 1 ? warpgroup / kRowGroups : 0),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        to_log2(kScores ? kLog2e : ScaleOf(p) * kLog2e) {
    if (warpgroup == kConsumers - 1) PassTurn();  // the first turn is the first warpgroup's
    if (kKeyGroups > 1 && key_group == 1) BarrierArrive(kFree + row_group, 2 * kWarpgroup);
  }

  __device__ __forceinline__ int RowInTile() const { return 64 * row_group + 16 * warp + lane / 4; }
  __device__ __forceinline__ int Row(const Tile& tile) const { return tile.row + RowInTile(); }
  // The first of this warpgroup's keys in tile j.
  __device__ __forceinline__ int Column(int j) const { return j * kKeys + key_group * kCols; }
  __device__ __forceinline__ void Release(uint64_t* barrier) { MbarrierArrive(barrier, ArrivesForWarp(lane)); }
  __device__ __forceinline__ void SyncWarpgroup() { BarrierSync(1 + warpgroup, kWarpgroup); }
  __device__ __forceinline__ void TakeTurn() { BarrierSync(1 + kConsumers + warpgroup, 2 * kWarpgroup); }
  __device__ __forceinline__ void PassTurn() {
    BarrierArrive(1 + kConsumers + (warpgroup + 1) % kConsumers, 2 * kWarpgroup);
  }

  // This warp's rows of a box of Q or O.
  __device__ __forceinline__ uint8_t* RowsOfWarp(uint8_t* box) const { return box + 16 * warp * 128; }

  __device__ __forceinline__ void TakeQ() {
    uint8_t* const rows = RowsOfWarp(shared.q[q.Index()][row_group]);
    const int fresh_lane = Fresh(lane);
#pragma unroll
    for (int d = 0; d < kQKSteps; ++d) Ldmatrix(Q[d], MatricesOf(rows + d / 4 * kQBox, fresh_lane, d % 4));
    FenceProxyAsync();  // before the next Q comes
  }

  // S = Q K^T
  __device__ __forceinline__ void IssueS() {
    if (!kBlockMask) MbarrierWait(&shared.k_full[k.index], k.parity);  // or Listed has
    WgmmaFence();
    const uint64_t a = Descriptor(shared.q[q.Index()][row_group], 0);
    const uint64_t b = Descriptor(shared.k[k.index] + key_group * kCols * 128, 0);
#pragma unroll
    for (int d = 0; d < kQKSteps; ++d) {
      const uint64_t b_d = Advance(b, d / 4 * kKVBox + d % 4 * 32);
      if constexpr (kTF32) {
        Wgmma<kCols>::template RS<Major::kK>(S, Q[d], b_d, d > 0);
      } else {
        Wgmma<kCols>::template SS<Major::kK, Major::kK>(S, Advance(a, d / 4 * kQBox + d % 4 * 32), b_d, d > 0);
      }
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ void FinishS(bool last) {
    Pin(S);
    Release(&shared.k_empty[k.index]);
    // No branch here: it would part the block in which the compiler places the wait for O among the exponentials.
    if (!kOInQ) MbarrierArrive(&shared.q_empty[q.Index()][row_group], ArrivesForWarp(lane) && last);
    k.Next();
  }

  // O += P V
  __device__ __forceinline__ void IssueO() {
    MbarrierWait(&shared.v_full[v.index], v.parity);
    WgmmaFence();
    const uint64_t b = Descriptor(shared.v[v.index] + key_group * kCols * 128, kKVBox);
#pragma unroll
    for (int c = 0; c < kCols / kStep; ++c) {
      const int at = kTF32 ? c / 4 * kTransposedBox + c % 4 * 32 : c * 16 * 128;
      Wgmma<kVDim>::template RS<kTF32 ? Major::kK : Major::kMN>(O, P + 4 * c, Advance(b, at), true);
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ void FinishO() {
    WgmmaWait<0>();
    Pin(O);
    Release(&shared.v_empty[v.index]);
    v.Next();
  }

  // The two rows' keys, from the lane's first column of tile j on: begin <= offset < end.
  __device__ __forceinline__ void RowEnds(const Tile& tile, int j, int (&begin)[2], int (&end)[2]) const {
    Positions positions = PositionsOf(p, tile.batch);
    if (!kQLengths) positions.q_length = int64_t(1) << 32;  // rows beyond T are not stored
    const int column = Column(j) + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyRange keys = RowKeys(positions, Row(tile) + 8 * h);
      begin[h] = int(min(keys.lo, int64_t(p.kv_len))) - column, end[h] = int(keys.hi) - column;
    }
  }

  // What has to be looked up in memory: which columns of tile j this lane's rows see.
  template <bool kMasked>
  __device__ __forceinline__ void Look(const Tile& tile, int j) {
    if (!kMasked || !kLookedUp) return;
    const Block block(p, tile.batch, kBlockMask ? shared.listed[k.index].kind : kEverything);
    const Entries entries(p, tile.batch, tile.head);
    const int row = Row(tile), column = Column(j) + lane % 4 * 2;
    const int row_in_block = (kRows == kQBlock ? 0 : tile.row % kQBlock) + RowInTile();
    const int column_in_block = (kKeys == kKVBlock ? 0 : j * kKeys % kKVBlock) + key_group * kCols;
    int begin[2], end[2];
    RowEnds(tile, j, begin, end);
#pragma unroll
    for (int w = 0; w < kSeenWords; ++w) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        seen[h][w] = FirstBits(end[h] - 32 * w);
        if (kWindow) seen[h][w] &= ~FirstBits(begin[h] - 32 * w);
        if (kBlockMask) seen[h][w] &= block.Word<kCols>(row_in_block + 8 * h, column_in_block, 32 * w) >> lane % 4 * 2;
      }
#pragma unroll
      for (int x = 0; (kSegments || kMask) && x < 16; ++x) {
        const int h = x / 2 % 2, bit = x / 4 * 8 + x % 2, offset = 32 * w + bit;
        if (offset < kCols && entries.Hidden(min(row + 8 * h, p.q_len - 1), min(column + offset, p.kv_len - 1)))
          seen[h][w] &= ~(1u << bit);
      }
    }
  }

  // Whether the warp's rows see all keys of the tile that was looked up.
  __device__ __forceinline__ bool AllSeen() const {
    if (!kVote) return false;
    uint32_t all = 0xFFFFFFFF;
#pragma unroll
    for (int w = 0; w < kSeenWords; ++w) all &= seen[0][w] & seen[1][w];
    return __all_sync(0xFFFFFFFFu, (all & 0x03030303u) == 0x03030303u);  // a lane has two columns of each 8
  }

  // From q_i k_j to s_ij, -inf where row i does not see key j. Without kScores S stays without its scale.
  template <bool kMasked>
  __device__ __forceinline__ void Scores(const Tile& tile, int j) {
    if (!kMasked && !kScores) return;
    const Entries entries(p, tile.batch, tile.head);
    const int row = Row(tile), column = Column(j) + lane % 4 * 2;
    int begin[2], end[2];
    RowEnds(tile, j, begin, end);
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) {
      const int h = i / 2 % 2, offset = i / 4 * 8 + i % 2;
      if (kScores) S[i] = Cap(p, S[i]);
      if (kBias)
        S[i] += entries.Bias(min(row + 8 * h, p.q_len - 1), min(column + offset, p.kv_len - 1));  // can be read
      if (!kMasked) continue;
      if (kLookedUp ? (seen[h][offset / 32] >> offset % 32 & 1) == 0
                    : offset >= end[h] || (kWindow && offset < begin[h])) {
        S[i] = -Infinity();
      }
    }
  }

  // The row maxima. O will have to be multiplied by alpha; `shift` is what the exponents are taken against.
  __device__ __forceinline__ void Maximum(float (&alpha)[2], float (&shift)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float maximum = S[2 * h];
#pragma unroll
      for (int i = 2 * h; i < kCols / 2; i += 4) maximum = fmaxf(maximum, fmaxf(S[i], S[i + 1]));
      m[h] = fmaxf(m[h], LaneMax<4>(maximum));
      alpha[h] = 1.0f;
      if ((m[h] - reference[h]) * to_log2 > kRescaleAt) {
        alpha[h] = Exp2((reference[h] - m[h]) * to_log2);
        reference[h] = m[h];
        l[h] *= alpha[h];
      }
      shift[h] = reference[h] == -Infinity() ? 0.0f : kMaximumApart ? reference[h] : reference[h] * to_log2;
    }
  }

  // S becomes P, l its row sums.
  __device__ __forceinline__ void Exponentials(const float (&shift)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 2 * h; i < kCols / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          S[i + e] = Exp2(kMaximumApart ? (S[i + e] - shift[h]) * to_log2 : fmaf(S[i + e], to_log2, -shift[h]));
          sum[e] += S[i + e];
        }
      }
      l[h] += sum[0] + sum[1];
    }
  }

  // Which entries of tile j dropout keeps.
  __device__ __forceinline__ void Draw(const Tile& tile, int j) {
    Pin(seed);  // so that what can be computed from it beforehand does not fill the registers
    const uint32_t row = Row(tile), rows = row / 16 * 8 + row % 8;
#pragma unroll
    for (int c = 0; c < kCols / 16; ++c) {
      const uint32_t columns = (Column(j) / 16 + c) * 4 + lane % 4;
      const Philox4 x = Philox({{columns, rows, seed[2], seed[3]}}, seed[0], seed[1]);
#pragma unroll
      for (int w = 0; w < 4; ++w) kept[4 * c + w] = NotBelow(x.x[w], p.drop_threshold);
    }
    Pin(kept);
  }

  // P = Z P, without the factor of what is kept.
  __device__ __forceinline__ void Drop() {
#pragma unroll
    for (int i = 0; i < kCols / 4; ++i) {
      const int c = i / 4 * 2 + i % 2, h = i / 2 % 2;
      if constexpr (kTF32) {
        P[4 * c + h] &= int32_t(kept[i] << 16) >> 16, P[4 * c + h + 2] &= int32_t(kept[i]) >> 16;
      } else {
        P[2 * c + h] &= kept[i];
      }
    }
  }

  // P as the left operand of O, without what is dropped.
  __device__ __forceinline__ void PackP() {
#pragma unroll
    for (int i = 0; i < kCols / kStep * 4; ++i)
      P[i] = kTF32 ? RoundTF32(__float_as_uint(S[i / 4 * 4 + i % 2 * 2 + i / 2 % 2])) : Pack(S[2 * i], S[2 * i + 1]);
    if (kDropout) Drop();
  }

  // Tile j of K, and tile j + 1 of V.
  template <bool kMasked>
  __device__ __forceinline__ void Step(const Tile& tile, int j, bool last) {
    float alpha[2], shift[2];
    Look<kMasked>(tile, j);  // before S needs registers
    TakeTurn();
    IssueS();
    IssueO();
    PassTurn();
    if (kDropout) Draw(tile, j);
    WgmmaWait<1>();
    FinishS(last);
    if (kScores || !kMasked || !AllSeen()) Scores<kMasked>(tile, j);
    Maximum(alpha, shift);
    Exponentials(shift);
    FinishO();
    if (__any_sync(0xFFFFFFFFu, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kVDim / 2; ++i) O[i] *= alpha[i / 2 % 2];
    }
    PackP();
  }

  // With a block mask: the tile of K that is there.
  __device__ __forceinline__ ListedTile Listed() {
    MbarrierWait(&shared.k_full[k.index], k.parity);
    return {Uniform(shared.listed[k.index].word)};
  }

  // All of a tile; false if the producer has no more.
  __device__ __forceinline__ bool Run(const TensorMap* o_map) {
    SyncWarp();  // all lanes have read the tile before, which q_empty will say
    MbarrierWait(&shared.q_full[q.Index()][row_group], q.Parity());
    // It stays in shared memory for want of registers, but for the loop's bounds. Those all threads have, which the
    // compiler cannot know.
    const Tile& tile = shared.tile[q.position][row_group];
    const int begin = kMaskedLeft || kBlockMask ? Uniform(tile.visible.any_lo) : 0, end = Uniform(tile.visible.any_hi);
    const int unmasked_begin = kMaskedLeft ? Uniform(tile.visible.every_lo) : 0;
    const int unmasked_end = Uniform(tile.visible.every_hi);
    if (begin == end) {
      if (tile.row < 0) return false;
      WriteEmpty(tile);
      return true;
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) m[h] = reference[h] = -Infinity(), l[h] = 0.0f;

    if (kDropout) {
      seed[0] = p.seed[2 * tile.batch], seed[1] = p.seed[2 * tile.batch + 1];
      seed[2] = p.head_id[tile.head], seed[3] = p.batch_id[tile.batch];
    }

    if (kTF32) TakeQ();
    ListedTile listed = kBlockMask ? Listed() : ListedTile();
    int j = kBlockMask ? listed.J() : end - 1;
    float alpha[2], shift[2];  // alpha of the first tile is not used: there is no O yet
    TakeTurn();
    IssueS();
    PassTurn();
#pragma unroll
    for (int i = 0; i < kVDim / 2; ++i) O[i] = 0.0f;
    const bool masked = kFirstMasked || (kBlockMask ? listed.Masked() : j >= unmasked_end || j < unmasked_begin);
    if (masked) Look<true>(tile, j);
    if (kDropout) Draw(tile, j);
    WgmmaWait<0>();
    FinishS(kBlockMask ? listed.Last() : j == begin);
    if (masked) {
      Scores<true>(tile, j);
    } else {
      Scores<false>(tile, j);
    }
    Maximum(alpha, shift);
    Exponentials(shift);
    PackP();
    if constexpr (kBlockMask) {
      while (!listed.Last()) {
        listed = Listed();
        if (listed.Masked() || kMask) {
          Step<true>(tile, listed.J(), listed.Last());
        } else {
          Step<false>(tile, listed.J(), listed.Last());
        }
      }
    } else {
      for (--j; j >= unmasked_end; --j) Step<true>(tile, j, j == begin);
      if (!kMask) {
        for (; j >= unmasked_begin; --j) Step<false>(tile, j, j == begin);
      }
      if (kMaskedLeft) {
        for (; j >= begin; --j) Step<true>(tile, j, j == begin);
      }
    }
    IssueO();
    FinishO();
    Finish(tile, o_map);
    return true;
  }

  // Where two warpgroups have the keys, the O, m and l of the one go to the other. It is the first to finish, and goes
  // on to the next tile.
  __device__ __forceinline__ void Finish(const Tile& tile, const TensorMap* o_map) {
    if (kKeyGroups == 1) {
      Write(tile, o_map);
    } else if (key_group == 0) {
      HandOver();
    } else {
      Merge();
      Write(tile, o_map);
    }
  }

  __device__ __forceinline__ void HandOver() {
    auto* const to = shared.handed[row_group];
    const int thread = threadIdx.x % kWarpgroup;
    BarrierSync(kFree + row_group, 2 * kWarpgroup);
#pragma unroll
    for (int i = 0; i < kVDim / 2; ++i) to[i][thread] = O[i];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto* const row = to + kVDim / 2 + 3 * h;
      row[0][thread] = m[h], row[1][thread] = l[h], row[2][thread] = reference[h];
    }
    BarrierArrive(kHanded + row_group, 2 * kWarpgroup);
  }

  // O, m, l of all keys, from those of either half.
  __device__ __forceinline__ void Merge() {
    const auto* const from = shared.handed[row_group];
    const int thread = threadIdx.x % kWarpgroup;
    float alpha[2], beta[2];
    BarrierSync(kHanded + row_group, 2 * kWarpgroup);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto* const row = from + kVDim / 2 + 3 * h;
      const float other = row[2][thread], common = fmaxf(reference[h], other);
      alpha[h] = reference[h] == -Infinity() ? 0.0f : Exp2((reference[h] - common) * to_log2);
      beta[h] = other == -Infinity() ? 0.0f : Exp2((other - common) * to_log2);
      reference[h] = common;
      m[h] = fmaxf(m[h], row[0][thread]);
      l[h] = l[h] * alpha[h] + row[1][thread] * beta[h];
    }
#pragma unroll
    for (int i = 0; i < kVDim / 2; ++i) O[i] = O[i] * alpha[i / 2 % 2] + from[i][thread] * beta[i / 2 % 2];
    BarrierArrive(kFree + row_group, 2 * kWarpgroup);
  }

  // The same where there is nothing to see.
  __device__ __forceinline__ void WriteEmpty(const Tile& tile) {
    constexpr int kChunks = kVDim * kElementBytes / 16;  // of a row
    const int thread = threadIdx.x % kWarpgroup, row0 = tile.row + 64 * row_group;
    const int rows = key_group == 0 ? min(64, p.q_len - row0) : 0;
    if (thread < rows) {
      const int64_t at = (int64_t(tile.batch) * p.q_heads + tile.head) * p.q_len + row0 + thread;
      p.l[at] = 0.0f, p.m[at] = -Infinity();
    }
    uint4* o = static_cast<uint4*>(p.o) + ((int64_t(tile.batch) * p.q_len + row0) * p.q_heads + tile.head) * kChunks;
#pragma unroll 1
    for (int i = thread; i < rows * kChunks; i += kWarpgroup)
      o[int64_t(i / kChunks) * p.q_heads * kChunks + i % kChunks] = {0, 0, 0, 0};
    SyncWarp();
    Release(&shared.q_empty[q.Index()][row_group]);
  }

  // O = diag(l)^-1 O, l and m.
  __device__ __forceinline__ void Write(const Tile& tile, const TensorMap* o_map) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      l[h] = LaneSum<4>(l[h]);
      factor[h] = l[h] == 0.0f ? 0.0f : KeptScale(p) * Reciprocal(l[h]);
    }
    uint8_t* const o = kOInQ ? shared.q[q.Index()][row_group] : shared.o[row_group];
    constexpr int kAtOnce = kOInQ || kOBoxes == kVBoxes ? kVBoxes : 1;  // boxes; if one, two take turns
    static_assert(kAtOnce == kVBoxes || kOBoxes == 2);
#pragma unroll
    for (int first = 0; first < kVBoxes; first += kAtOnce) {
      uint8_t* const to = o + first % 2 * kQBox;
      if (!kOInQ && first != 1) {  // what was there has left; before the first box what was in either
        first == 0 ? TmaWaitRead<0>() : TmaWaitRead<1>();
        SyncWarpgroup();
      }
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) StoreBox(RowsOfWarp(to + b * kQBox), first + b, factor);
      FenceProxyAsync();
      SyncWarpgroup();
      if (threadIdx.x % kWarpgroup == 0) {
        for (int b = 0; b < kAtOnce; ++b)
          TmaStore(o_map, to + b * kQBox, (first + b) * kBoxColumns, tile.row + 64 * row_group, tile.head, tile.batch);
        TmaCommit();
        if (kOInQ) TmaWaitRead<0>();
      }
    }
    if (kOInQ) Release(&shared.q_empty[q.Index()][row_group]);
    WriteStatistics(tile);  // late, since the fence above waits for all stores before it
  }

  // What was NaN or +inf in a row of S has made its l NaN, but not its m.
  __device__ __forceinline__ void WriteStatistics(const Tile& tile) {
    const int row = Row(tile);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane % 4 == 0 && row + 8 * h < p.q_len) {
        const int64_t at = (int64_t(tile.batch) * p.q_heads + tile.head) * p.q_len + row + 8 * h;
        p.m[at] = isnan(l[h]) ? l[h] : kScores ? m[h] : m[h] * ScaleOf(p);
        p.l[at] = l[h] == 0.0f ? 0.0f : l[h] * Exp2((reference[h] - m[h]) * to_log2);
      }
    }
  }

  // A box of O to this warp's rows of it in shared memory.
  __device__ __forceinline__ void StoreBox(uint8_t* rows, int box, const float (&factor)[2]) {
#pragma unroll
    for (int c = 0; c < 4 && (4 * box + c) * kStep < kVDim; ++c) {
      const uint32_t to = MatricesOf(rows, lane, c);
      const float* x = O + (4 * box + c) * kStep / 2;
      if constexpr (kTF32) {
        Stmatrix(to, __float_as_uint(x[0] * factor[0]), __float_as_uint(x[2] * factor[1]),
                 __float_as_uint(x[1] * factor[0]), __float_as_uint(x[3] * factor[1]));
      } else {
        // The last 8 columns of 16 may be beyond the head dim.
        const float* y = (4 * box + c) * kStep + 8 < kVDim ? x + 4 : x;
        Stmatrix(to, Pack(x[0] * factor[0], x[1] * factor[0]), Pack(x[2] * factor[1], x[3] * factor[1]),
                 Pack(y[0] * factor[0], y[1] * factor[0]), Pack(y[2] * factor[1], y[3] * factor[1]));
      }
    }
  }
};

}  // namespace jax_flash

extern "C" __constant__ int jax_flash_shared_bytes = sizeof(jax_flash::ForwardShared);

extern "C" __global__ void __launch_bounds__(jax_flash::kThreads, 1)
    jax_flash_forward(const __grid_constant__ jax_flash::Params p JAX_FLASH_FORWARD_MAPS(JAX_FLASH_MAP)) {
  using namespace jax_flash;
  extern __shared__ __align__(1024) uint8_t memory[];
  ForwardShared& shared = *reinterpret_cast<ForwardShared*>(memory);
  if (threadIdx.x == 0) {
    constexpr uint32_t kByConsumers = ArrivalsOf(4 * kConsumers);
    for (int b = 0; b < kQBuffers; ++b) {
      for (int w = 0; w < kRowGroups; ++w)
        MbarrierInit(&shared.q_full[b][w], 1), MbarrierInit(&shared.q_empty[b][w], ArrivalsOf(4 * kKeyGroups));
    }
    for (int s = 0; s < kStages; ++s) {
      MbarrierInit(&shared.k_full[s], 1), MbarrierInit(&shared.k_empty[s], kByConsumers);
      MbarrierInit(&shared.v_full[s], kTF32 ? ArrivalsOf(kVBoxes) : 1);
      MbarrierInit(&shared.v_empty[s], kByConsumers);
    }
    for (int s = 0; kScout && s < kAhead; ++s)
      MbarrierInit(&shared.found_full[s], 1), MbarrierInit(&shared.found_empty[s], 1);
    for (int s = 0; kTF32 && s < kLandings; ++s)
      MbarrierInit(&shared.landed[s], 1), MbarrierInit(&shared.transposed[s], ArrivalsOf(kTransposers));
    FenceMbarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    SetMaxRegistersDown<kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer{p, shared, &query_map, &key_map, &value_map}.Run();
    } else if (kScout && threadIdx.x == 32) {
      Scout{p, shared}.Run();
    } else if (kTF32 && threadIdx.x >= 32) {
      Transposer{shared}.Run();
    }
  } else {
    SetMaxRegistersUp<kConsumerRegisters>();
    Consumer consumer(p, shared);
    while (consumer.Run(&o_map)) consumer.q.Next();
    TmaWaitRead<0>();  // shared memory is this CTA's until O has left
  }
}
