// The producer warpgroup of the Hopper backward. One thread chooses the next tiles and loads K, V, Q and dO. For f32
// the other warps transpose Q and dO.
#pragma once

#include "hopper/backward_tiles.cuh"
#include "hopper/transpose.cuh"
#include "ptx/cluster.cuh"
#include "ptx/counter.cuh"
#include "ptx/mbarrier.cuh"
#include "scheduler/kv_schedule.cuh"
#include "scheduler/lists.cuh"
#include "scheduler/schedule.cuh"

namespace jax_flash::hopper::backward {

__device__ __forceinline__ auto MakeSchedule(const Params& p, const Shared& shared) {
  if constexpr (kFusedRows) {
    return DynamicKVTiles(p);
  } else if constexpr (kListed && kPairs) {
    return StaticLists<kCluster>(p);
  } else if constexpr (kListed) {
    return DynamicLists(p);
  } else if constexpr (kOrdered && kPairs) {
    return DescendingKVTiles<OneNumber>(p, ClusterRank() == 0 ? shared.number : PeerLoad(&shared.number));
  } else if constexpr (kOrdered) {
    return DescendingKVTiles<DynamicNumbers>(p);
  } else {
    return StaticSchedule<kCluster>();
  }
}

// The thread that loads tiles, and describes them to the consumers.
struct Producer {
  const Params& p;
  Shared& shared;
  const TensorMap *q_map, *k_map, *v_map, *do_map, *bias_map;
  uint32_t kv_parity = 0;
  uint32_t loaded = 0;  // steps so far; a Ring would need one more register

  __device__ __forceinline__ void Run() {
    constexpr int kClusterKeys = kKeys * kCluster;
    if constexpr (kListed) return RunListed();
    const int tiles = (p.kv_len + kClusterKeys - 1) / kClusterKeys;
    const int heads = kSumKV ? p.q_heads : p.kv_heads;        // an item is a kv tile of one of these
    const int group = kFusedRows ? 1 : p.q_heads / heads;     // heads of Q that an item loops over
    const int sharing = kSumKV ? p.q_heads / p.kv_heads : 1;  // heads among `heads` that share a head of K
    auto schedule = MakeSchedule(p, shared);
    int item, t;
    while (schedule.Next(p.batch * heads, tiles, &item, &t)) {
      WaitForRows(item);
      const int head = item % heads, batch = item / heads;
      const Positions positions = PositionsOf(p, batch);
      VisibleTile found = {{t * kClusterKeys + (kPairs ? ClusterRank() * kKeys : 0), head / sharing, batch, item},
                           RowsOf(p, positions, batch, t * kClusterKeys, (t + 1) * kClusterKeys)};
      const int first = found.rows.any_lo / kRows, end = (found.rows.any_hi + kRows - 1) / kRows;
      int steps = found.rows.any_lo < found.rows.any_hi ? (end - first) * group : 0;
      if (kCountsHiddenTiles) steps = max(end - first, 0) * group;
      found.tile.steps = steps;
      if (kVisibleTileInShared) shared.visible_tile = found;
      const int every_hi = EveryHi(found.rows, positions);
      const VisibleTile& visible = kVisibleTileInShared ? shared.visible_tile : found;
      const KVTile& tile = visible.tile;
      const Visible& rows = visible.rows;
      // Loads the n-th q tile from the end. The first q tile is loaded before K and V, because its buffer is free
      // earlier. The next kv tile is requested from the scheduler before the last q tile, to hide the latency of the
      // atomic.
      const auto load = [&](int n, int q_head, int row_block, int row) {
        const bool masked = row < rows.every_lo || row + kRows > every_hi;
        const bool hides = row < rows.every_lo || row + kRows > rows.every_hi;
        if (n == 1) schedule.Request();
        Load({row, q_head, row_block, kFullBlock, masked ? Masks::kAll : Masks::kNone, n == 1}, batch, tile.first_key,
             hides);
        if (n == steps) LoadKV(tile);
      };
      if (steps == 0) schedule.Request(), LoadKV(tile);
      if constexpr (kInterleavedHeads) {
        // The outer loop is over q tiles, the inner loop over the query heads of the group. A causal schedule has pairs
        // of kv tiles. The first of a pair, which fewer rows see, starts at the last row; the second starts at its
        // first row. So all CTAs of one head of K process the same few rows at a time, and HBM delivers these rows
        // once. Each CTA starts with a different head of the group, otherwise their additions to dQ would collide.
        const bool down = 2 * t >= tiles;
        const int first_block = RowBlockOf(batch, head * group, 0), first_member = t % group;
        int row = (down ? end - 1 : first) * kRows, member = first_member;
        for (int n = steps; n > 0; --n) {
          load(n, head * group + member, first_block + member * BlocksOfHead(p) + row / kRowBlock, row);
          member = member + 1 < group ? member + 1 : 0;
          if (member == first_member) row += down ? -kRows : kRows;
        }
      } else {
        int q_tile = first, q_head = head * group, row_block = 0;
        for (int n = steps; n > 0; --n) {
          if (q_tile == first) row_block = RowBlockOf(batch, q_head, q_tile * kRows);
          load(n, q_head, row_block, q_tile * kRows);
          row_block += kRows / kRowBlock;
          if (++q_tile == end) q_tile = first, ++q_head;
        }
      }
    }
    End();
  }

  // The same with a block mask. Blocks consist of whole tiles.
  __device__ __forceinline__ void RunListed() {
    constexpr int kClusterKeys = kKeys * kCluster, kTiles = kTilesOfColumn<kClusterKeys>;
    static_assert(!kListed || kTiles > 0);
    auto schedule = MakeSchedule(p, shared);
    int item, t;
    while (schedule.Next(p.batch * p.kv_heads, ListedColumnTiles<kClusterKeys>(p), &item, &t)) {
      WaitForRows(item);
      const int head = item % p.kv_heads, batch = item / p.kv_heads;
      const BlockList blocks = ColumnList(p, batch, head * (p.q_heads / p.kv_heads), t / kTiles);
      const int first_key = FirstColumn<kClusterKeys>(blocks, t % kTiles);
      const Positions positions = PositionsOf(p, batch);
      VisibleTile found = {{first_key + (kPairs ? ClusterRank() * kKeys : 0), head, batch, item},
                           RowsOf(p, positions, batch, first_key, first_key + kClusterKeys)};
      found.rows.every_hi = EveryHi(found.rows, positions);
      if (kVisibleTileInShared) shared.visible_tile = found;
      auto& [tile, rows] = kVisibleTileInShared ? shared.visible_tile : found;
      ListedQTiles<kRows> at(p, tile.batch, tile.head, blocks, rows);
      tile.steps = at.Exists();
      if (!at.Exists()) schedule.Request(), LoadKV(tile);
      for (bool first = true; at.Exists(); first = false) {
        const int row = at.row, q_head = at.head;
        const int kind = KindOfBlock(p, tile.batch, q_head, row, tile.first_key);
        at.Next();
        const bool within = row >= rows.every_lo && row + kRows <= rows.every_hi, last = !at.Exists();
        const Masks masks = !within              ? Masks::kAll
                            : kind == kFullBlock ? Masks::kNone
                            : kMaskMod           ? Masks::kAll
                                                 : Masks::kOnlyBlock;
        if (last) schedule.Request();
        Load({row, q_head, RowBlockOf(tile.batch, q_head, row), kind, masks, last}, tile.batch, tile.first_key, true);
        if (first) LoadKV(tile);
      }
    }
    End();
  }

  // Waits until the rows of a head are prepared.
  __device__ __forceinline__ void WaitForRows(int head) {
    if (!kFusedRows) return;
    if (OldestHead() <= head - p.scratch_heads) Flush();
    WaitForCount(p.prepared + head, BlocksOfHead(p));
    FenceProxyAsyncGlobal();
  }

  // The head of the oldest kv tile with unreported additions to dQ. Among the last heads it may not be the lowest, but
  // these heads do not wait for each other's scratch.
  __device__ __forceinline__ int OldestHead() const {
    const int older = shared.tile[kv_parity].item_head, newer = shared.tile[kv_parity ^ 1].item_head;
    return older >= 0 ? older : newer >= 0 ? newer : 0x7FFFFFFF;
  }

  // Reports the additions of all tiles so far. This must precede a wait for scratch that one of these heads may still
  // use; otherwise the wait is a deadlock. An empty tile goes through the consumers. When they release it, they are
  // done with all tiles before it.
  __device__ __forceinline__ void Flush() {
    MbarrierWait(&shared.k_empty, kv_parity ^ 1);
    ReportAdded(Unreported());
    shared.tile[kv_parity] = {0, 0, -1, -1, 0};
    MbarrierArrive(&shared.k_full);
    MbarrierWait(&shared.v_empty, kv_parity ^ 1);
    MbarrierArrive(&shared.v_full);
    kv_parity ^= 1;
    MbarrierWait(&shared.k_empty, kv_parity ^ 1);
    ReportAdded(Unreported());
    shared.tile[kv_parity].item_head = -1;
  }

  // The head of the second to last tile. Read it before its slot is overwritten. When a tile has been computed
  // (k_empty), all dQ of the tile before it has been added, because consumers wait for that in their first step.
  __device__ __forceinline__ int Unreported() const { return kFusedRows ? shared.tile[kv_parity].item_head : -1; }
  __device__ __forceinline__ void ReportAdded(int head) {
    if (!kFusedRows || head < 0) return;
    FenceProxyAsyncGlobal();
    Count(p.added + head, true);
  }

  // The end of the rows that need no masks. Fully masked rows have P = 0 because of their L, unless a bias or a
  // score_mod makes their scores +inf.
  __device__ __forceinline__ int EveryHi(const Visible& rows, const Positions& positions) const {
    return kAddsToScores || rows.every_hi < positions.q_length ? rows.every_hi : BlocksOfHead(p) * kRowBlock;
  }

  __device__ __forceinline__ int RowBlockOf(int batch, int head, int row) const {
    return FirstRowBlock(p, batch * p.q_heads + head) + row / kRowBlock;
  }

  __device__ __forceinline__ void End() {
    MbarrierWait(&shared.k_empty, kv_parity ^ 1);
    ReportAdded(Unreported());
    shared.tile[kv_parity].first_key = -1;
    MbarrierArrive(&shared.k_full);
    if (kTF32) {
      const int stage = loaded % kStages, parity = loaded / kStages % 2;
      MbarrierWait(&shared.do_empty[stage], parity ^ 1);
      shared.more[stage] = false;
      MbarrierArrive(&shared.do_full[stage]);
    }
  }

  __device__ __forceinline__ void LoadKV(const KVTile& tile) {
    const auto load = [&](uint8_t* to, const TensorMap* map, uint64_t* full, int d, int first_key) {
      TmaLoad(to, map, full, d, first_key, tile.head, tile.batch);
    };
    // The number of existing keys from `first_key` on. The others are set to 0: their P is 0, but 0 times a NaN in K or
    // V is NaN.
    const auto keys = [&](int first_key) {
      if (!kProblem.kv_lengths) return kKeys;
      return min(max(int(PositionsOf(p, tile.batch).kv_length) - first_key, 0), kKeys);
    };
    const int own = keys(tile.first_key), other = kPairs ? keys(tile.first_key ^ kKeys) : kKeys;

    const SharedV v{shared.v};
    MbarrierWait(&shared.v_empty, kv_parity ^ 1);
    uint64_t* const v_arrived = own < kKeys ? &shared.uncleared[0].barrier : &shared.v_full;
    MbarrierArriveExpectTx(v_arrived, v.kBytes);
    for (int b = 0; b < kVBoxes; ++b) load(v.Box(b), v_map, v_arrived, b * kBoxColumns, tile.first_key);

    MbarrierWait(&shared.k_empty, kv_parity ^ 1);
    const int added = Unreported();
    shared.tile[kv_parity] = tile;
    uint64_t* const k_arrived = own < kKeys || other < kKeys ? &shared.uncleared[1].barrier : &shared.k_full;
    const SharedK k{kTF32SameKeys ? shared.staging : kTF32 ? shared.ds[0] : shared.k};
    // With kPairs: K of both CTAs in the columns of this CTA's half of dQ, and K of its own keys in the other columns.
    const SharedHalfK own_half{shared.k}, other_half{own_half.Box(kHalfBoxes)}, rest_of_k{shared.staging};
    if (kPairs) {
      const int half = ClusterRank() * kHalfColumns, rest = kHalfColumns - half;
      MbarrierArriveExpectTx(k_arrived, 3 * SharedHalfK::kBytes);
      for (int b = 0; b < kHalfBoxes; ++b) {
        load(own_half.Box(b), k_map, k_arrived, half + b * 64, tile.first_key);
        load(other_half.Box(b), k_map, k_arrived, half + b * 64, tile.first_key ^ kKeys);
        load(rest_of_k.Box(b), k_map, k_arrived, rest + b * 64, tile.first_key);
      }
    } else {
      MbarrierArriveExpectTx(k_arrived, sizeof(shared.k));
      for (int b = 0; b < kQKBoxes; ++b) load(k.Box(b), k_map, k_arrived, b * kBoxColumns, tile.first_key);
    }

    if (own < kKeys) {
      shared.uncleared[0].Wait();
      ClearRowsFrom(v, own, &shared.v_full);
    }
    if (own < kKeys || other < kKeys) {
      shared.uncleared[1].Wait();
      if (kPairs) {
        MbarrierArriveExpectTx(&shared.k_full, (2 * (kKeys - own) + kKeys - other) * kHalfBoxes * kBoxBytes);
        ClearRows(own_half, own, kKeys - own, &shared.k_full);
        ClearRows(other_half, other, kKeys - other, &shared.k_full);
        ClearRows(rest_of_k, own, kKeys - own, &shared.k_full);
      } else {
        ClearRowsFrom(k, own, &shared.k_full);
      }
    }
    kv_parity ^= 1;
    ReportAdded(added);  // last, because K should not wait for its fence and release
  }

  // Loads a tile of Q and dO, and the tile of the bias for their rows and the keys from `first_key` on. `hides`: masks
  // hide entries of the tile. Otherwise a row can be empty only if its scores are -inf.
  __device__ __forceinline__ void Load(const Step& step, int batch, int first_key, bool hides) {
    const int stage = loaded % kStages, parity = loaded / kStages % 2;
    const int64_t statistics = int64_t(step.row_block) * kRowBlock;
    const bool clears = kEmptyRows && (hides || kBias || kScoreMod) &&
                        shared.empty_rows.Read(p.empty_rows + step.row_block * (kRowBlock / 32));
    uint64_t* const q_arrived = clears ? &shared.uncleared[0].barrier : &shared.q_full[stage];
    uint64_t* const do_arrived = clears ? &shared.uncleared[1].barrier : &shared.do_full[stage];
    const auto clear_q = [&] {
      shared.uncleared[0].Wait();
      shared.empty_rows.Clear(SharedQ{shared.q[stage]}, &shared.q_full[stage]);
    };

    MbarrierWait(&shared.q_empty[stage], parity ^ 1);
    shared.step[stage] = step;
    MbarrierArriveExpectTx(q_arrived, sizeof(shared.q[0]) + sizeof(shared.minus_l[0]) + kBiasTile);
    SharedQ{shared.q[stage]}.Load(q_map, q_arrived, step.row, step.head, batch);
    if (kBiasTiles) LoadBiasTile(p, shared.bias[stage], bias_map, q_arrived, step.row, first_key, step.head, batch);
    BulkLoad(shared.minus_l[stage][0], p.logsumexp + statistics, kRows * 4, q_arrived);
    if (kSeparateMaximum)
      BulkLoad(shared.minus_l[stage][kSeparateMaximum], p.maximum + statistics, kRows * 4, q_arrived);
    if (kStages == 1 && clears) clear_q();  // dO may have no buffer until consumers have read this Q

    MbarrierWait(&shared.do_empty[stage], parity ^ 1);
    if (kTF32) shared.more[stage] = true;
    MbarrierArriveExpectTx(do_arrived, sizeof(shared.d_o[0]) + kRows * 4);
    SharedDO{shared.d_o[stage]}.Load(do_map, do_arrived, step.row, step.head, batch);
    BulkLoad(shared.d[stage], p.d + statistics, kRows * 4, do_arrived);
    if (kStages > 1 && clears) clear_q();
    if (clears) {
      shared.uncleared[1].Wait();
      shared.empty_rows.Clear(SharedDO{shared.d_o[stage]}, &shared.do_full[stage]);
    }
    ++loaded;
  }
};

// TF32: transposes square i, of 32 rows and columns, of a tile of Q or dO.
template <int kBoxes>
__device__ __forceinline__ void TransposeSquareOf(SharedTile<kRows, kBoxes> tile, uint8_t* transposed, int i) {
  TransposeSquare(tile.Box(i % kBoxes) + i / kBoxes * 32 * kBoxBytes, transposed + i * kBoxColumns * kBoxBytes);
}

// TF32: a warp that computes its share of dO^T and Q^T. Each of these warps waits for every tile and arrives at its
// barriers, even without a share of the tile. Otherwise a barrier could be two phases ahead, and a wait on its parity
// would succeed too early.
struct Transposer {
  Shared& shared;
  Ring<kStages> at;
  uint32_t parity = 0;
  int turn = threadIdx.x / 32 - 1;  // how many squares to skip before this warp's next one

  // Transposes a tile that has arrived, if kWanted, after the memory of its transpose is free.
  template <bool kWanted, int kBoxes>
  __device__ __forceinline__ void Transpose(SharedTile<kRows, kBoxes> from, uint8_t* to, uint64_t* from_empty,
                                            uint64_t* to_full, uint64_t* to_empty) {
    const bool arrives = ArrivesForWarp(threadIdx.x % 32);
    MbarrierWait(to_empty, parity ^ 1);
#pragma unroll 1
    for (int i = 0; kWanted && i < kBoxes * kRows / 32; ++i, --turn) {
      if (turn > 0) continue;
      TransposeSquareOf(from, to, i);
      turn = kTransposers;
    }
    FenceProxyAsync();
    SyncWarp();
    MbarrierArrive(to_full, arrives);
    MbarrierArrive(from_empty, arrives);
  }

  __device__ __forceinline__ void Run() {
    while (true) {
      const int stage = at.index;
      MbarrierWait(&shared.do_full[stage], at.parity);
      if (!Uniform(shared.more[stage])) return;
      Transpose<kDV>(SharedDO{shared.d_o[stage]}, shared.do_t, &shared.do_empty[stage], &shared.do_t_full,
                     &shared.do_t_empty);
      if (kQTransposers > 0) {
        MbarrierWait(&shared.q_full[stage], at.parity);
        Transpose<kDK>(SharedQ{shared.q[stage]}, shared.q_t, &shared.q_empty[stage], &shared.q_t_full,
                       &shared.q_t_empty);
      }
      at.Next();
      parity ^= 1;
    }
  }
};

}  // namespace jax_flash::hopper::backward
