// The Hopper forward's tiles: how they lie in shared memory, which of them there are, and who loads them.
#pragma once

#include "config.cuh"
#include "hopper/transpose.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"
#include "ptx/warp.cuh"
#include "scheduler/lists.cuh"
#include "scheduler/ranges.cuh"
#include "scheduler/schedule.cuh"

namespace jax_flash {

static_assert(kTiling.family == Family::kHopper);
constexpr int kRows = kTiling.rows, kKeys = kTiling.cols;  // of tiles of Q, and of K and V
constexpr int kConsumers = kTiling.groups;
constexpr int kStages = kTiling.stages;  // tiles of K, and of V, in flight

constexpr int kRowGroups = kRows / 64, kKeyGroups = kConsumers / kRowGroups;
constexpr int kCols = kKeys / kKeyGroups;  // of S in one warpgroup
static_assert(kRows % 64 == 0 && kConsumers % kRowGroups == 0 && kKeyGroups <= 2 && kKeys % kKeyGroups == 0);
static_assert(kCols % (kTF32 ? 32 : 16) == 0 && (kKeyGroups == 1 || !kTF32));
constexpr int kThreads = kWarpgroup * (kConsumers + 1);
constexpr int kQKBoxes = (kQKDim + kBoxColumns - 1) / kBoxColumns;  // of Q and K
constexpr int kVBoxes = (kVDim + kBoxColumns - 1) / kBoxColumns;    // of V and O
constexpr int kQBox = kBoxRows * kBoxBytes;                         // bytes of a box of Q or O
constexpr int kKVBox = kKeys * kBoxBytes;                           // bytes of a box of K or V
constexpr int kTransposedBox = kVBoxes * kBoxColumns * 128;         // bytes of 32 keys of V^T
constexpr int kTransposers = 3;                                     // warps
constexpr int kLandings = kCols < 64 ? 8 : 4;                       // boxes of V in flight that are to be transposed
constexpr bool kScout = kBlockMask && !kTF32;                       // is there a thread that looks up lists ahead?
constexpr int kAhead = kScout ? 8 : 1;                              // tiles of K and V that it is ahead at most
// Registers a thread; together what the kernel starts with.
constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kBlockMask || kTF32 ? 56 : 40;
constexpr int kConsumerRegisters = kConsumers == 2 ? (504 - kProducerRegisters) / 2 : kConsumers == 3 ? 160 : 112;
// O leaves through shared memory of its own, so that the next tile of Q can come: whole, or box by box by way of two;
// or, where that is too much, through Q's. Where there is room for two tiles of Q, the next one is there in time.
constexpr int kQBytes = kRowGroups * kQKBoxes * kQBox;
constexpr int kKVBytes = (kQKBoxes + kVBoxes) * kStages * kKVBox + (kTF32 ? kLandings * kKVBox + 1024 : 0);
constexpr int kHandedValues = kVDim / 2 + 6;  // of a thread: its O, and m, l and the reference of its two rows
constexpr int kHandedBytes = kKeyGroups > 1 ? kRowGroups * kHandedValues * kWarpgroup * 4 : 0;
constexpr int kRoom = 226 * 1024 - kKVBytes - kHandedBytes;          // for Q and O
constexpr int kRoomForO = (kRoom - kQBytes) / (kRowGroups * kQBox);  // boxes of each row group
constexpr int kOBoxes = kRoomForO >= kVBoxes ? kVBoxes : kRoomForO >= 2 ? 2 : 0;
constexpr bool kOInQ = kOBoxes == 0;
constexpr int kQBuffers = 2 * kQBytes + kRowGroups * kOBoxes * kQBox > kRoom ? 1 : 2;
static_assert(kKeyGroups == 1 || !kOInQ);
static_assert(!kOInQ || kVBoxes <= kQKBoxes);

// A tile of the output, and the tiles of K and V that it sees. With a block mask these are keys, and it sees no more
// than that.
struct Tile {
  int row, head, batch;
  Visible visible;
};

// With a block mask: a tile of K and V that comes.
struct ListedTile {
  int word = -1;  // 4 j + 2 masked + last; < 0: there is none
  int kind;       // of its block

  __device__ __forceinline__ bool There() const { return word >= 0; }
  __device__ __forceinline__ int J() const { return word / 4; }
  __device__ __forceinline__ bool Masked() const { return word & 2; }
  __device__ __forceinline__ bool Last() const { return word & 1; }
};

struct ForwardShared {
  alignas(1024) uint8_t q[kQBuffers][kRowGroups][kQKBoxes * kQBox];
  alignas(1024) uint8_t o[kOInQ ? 1 : kRowGroups][kOInQ ? 1 : kOBoxes * kQBox];
  alignas(1024) uint8_t k[kStages][kQKBoxes * kKVBox];
  alignas(1024) uint8_t v[kStages][kVBoxes * kKVBox];  // f32: of V^T
  uint64_t q_full[kQBuffers][kRowGroups], q_empty[kQBuffers][kRowGroups];
  Tile tile[2 * kQBuffers][kRowGroups];  // comes with q, stays until the next tile's q goes
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  ListedTile listed[kBlockMask ? kStages : 1];  // comes with k
  ListedTile found[kAhead];                     // by the scout
  Tile found_tile[kAhead + 1];                  // comes with the first of them
  uint64_t found_full[kAhead], found_empty[kAhead];
  // What a warpgroup hands over, thread by thread.
  float handed[kKeyGroups > 1 ? kRowGroups : 1][kKeyGroups > 1 ? kHandedValues : 1][kKeyGroups > 1 ? kWarpgroup : 1];
  // f32: V as it comes
  uint64_t landed[kTF32 ? kLandings : 1], transposed[kTF32 ? kLandings : 1];
  bool more[kTF32 ? kLandings : 1];  // comes with a box, or says that there are none
  alignas(kTF32 ? 1024 : 1) uint8_t landing[kTF32 ? kLandings : 1][kTF32 ? kKVBox : 1];
};

static_assert(sizeof(ForwardShared) <= 227 * 1024);

// With a block mask: goes through the tiles of the output, and through those of K and V that each of them sees.
struct Lookup {
  const Params& p;
  Tile tile;
  const int32_t* kinds;
  ListedTiles<kKeys, kKVBlock> keys;

  __device__ __forceinline__ const Tile& Here() const { return tile; }
  // Whether there is one more.
  __device__ __forceinline__ bool NextTile() {
    constexpr int kTiles = kBlockMask ? kQBlock / kRows : 1;  // of a block
    const int q_heads = Fresh(p.q_heads);
    int item, t;
    if (!CountedLists(p).Next(p.batch * q_heads, BlockRows(p) * kTiles, &item, &t)) return false;
    tile.head = item % q_heads, tile.batch = item / q_heads;
    const BlockList blocks = RowList(p, tile.batch, tile.head, t / kTiles);
    tile.row = blocks.index * kQBlock + t % kTiles * kRows;
    tile.visible = KeysOf(p, PositionsOf(p, tile.batch), tile.batch, tile.row, tile.row + kRows);
    kinds = KindsOfRow(p, tile.batch, tile.head, tile.row);
    keys = {blocks, tile.visible};
    if (keys.at < 0) tile.visible.any_hi = tile.visible.any_lo;
    return true;
  }

  __device__ __forceinline__ ListedTile NextKeys() {
    if (keys.at < 0) return {};
    const int column = keys.at, kind = kinds[column / kKVBlock];
    const bool every =
        tile.visible.every_lo <= column && column + kKeys <= tile.visible.every_hi && kind == kEverything;
    keys.Next(tile.visible);
    return {column / kKeys * 4 + !every * 2 + (keys.at < 0), kind};
  }
};

// A thread that does so ahead of the one that loads: a counter, a list, its members and their kinds, each of which says
// where the next is, take as long as the tile of a short list.
struct Scout {
  const Params& p;
  ForwardShared& shared;
  Ring<kAhead> at;
  Ring<kAhead + 1> tiles;  // with one more there is no need of barriers for them

  __device__ __forceinline__ void Run() {
    Lookup lookup{p};
    while (lookup.NextTile()) {
      ListedTile keys = lookup.NextKeys();
      Wait();
      Tell(lookup.tile);
      Tell(keys);
      while (keys.There() && !keys.Last()) {
        keys = lookup.NextKeys();
        Wait();
        Tell(keys);
      }
    }
    Wait();
    Tell(Tile{-1});
    Tell(ListedTile{});
  }

 private:
  __device__ __forceinline__ void Wait() { MbarrierWait(&shared.found_empty[at.index], at.parity ^ 1); }
  __device__ __forceinline__ void Tell(const Tile& next) {
    shared.found_tile[tiles.index] = next;
    tiles.Next();
  }
  __device__ __forceinline__ void Tell(ListedTile keys) {
    shared.found[at.index] = keys;
    MbarrierArrive(&shared.found_full[at.index]);
    at.Next();
  }
};

// What it has found, like Lookup.
struct Found {
  ForwardShared& shared;
  Ring<kAhead> at;
  Ring<kAhead + 1> tiles;
  const Tile* tile;

  __device__ __forceinline__ const Tile& Here() const { return *tile; }
  __device__ __forceinline__ bool NextTile() {
    MbarrierWait(&shared.found_full[at.index], at.parity);
    tile = &shared.found_tile[tiles.index];
    tiles.Next();
    return tile->row >= 0;
  }
  __device__ __forceinline__ ListedTile NextKeys() {
    MbarrierWait(&shared.found_full[at.index], at.parity);
    const ListedTile keys = shared.found[at.index];
    MbarrierArrive(&shared.found_empty[at.index]);
    at.Next();
    return keys;
  }
};

// Without a block mask: the next tile of the output; false when there are no more.
__device__ __forceinline__ bool Next(const Params& p, Schedule<>* schedule, Tile* tile) {
  const int heads = p.batch * p.q_heads, tiles = (p.q_len + kRows - 1) / kRows;
  int head, t;
  if (!schedule->Next(heads, tiles, &head, &t)) return false;
  tile->row = t * kRows;
  tile->head = head % p.q_heads;
  tile->batch = head / p.q_heads;
  const Visible keys = KeysOf(p, PositionsOf(p, tile->batch), tile->batch, tile->row, tile->row + kRows);
  const int begin = keys.any_lo / kKeys;
  const int end = keys.any_lo < keys.any_hi ? (keys.any_hi + kKeys - 1) / kKeys : begin;
  tile->visible = {begin, end, max((keys.every_lo + kKeys - 1) / kKeys, begin), max(keys.every_hi / kKeys, begin)};
  return true;
}

struct Producer {
  const Params& p;
  ForwardShared& shared;
  const TensorMap *q_map, *k_map, *v_map;
  Ring<kStages> at;  // the next tile of V; K is one ahead, or none
  Ring<kLandings> landing;
  PackedRing<kQBuffers> q;

  __device__ __forceinline__ void LoadK(Ring<kStages> k, int j, int head, int batch, ListedTile listed = {}) {
    MbarrierWait(&shared.k_empty[k.index], k.parity ^ 1);
    if (kBlockMask) shared.listed[k.index] = listed;
    MbarrierArriveExpectTx(&shared.k_full[k.index], kQKBoxes * kKVBox);
    for (int b = 0; b < kQKBoxes; ++b)
      TmaLoad(shared.k[k.index] + b * kKVBox, k_map, &shared.k_full[k.index], b * kBoxColumns, j * kKeys, head, batch);
  }
  __device__ __forceinline__ void LoadV(int j, int head, int batch) {
    if constexpr (kTF32) {
#pragma unroll 1
      for (int b = 0; b < kVBoxes; ++b) {
        Land(true);
        TmaLoad(shared.landing[landing.index], v_map, &shared.landed[landing.index], b * kBoxColumns, j * kKeys, head,
                batch);
        landing.Next();
      }
    } else {
      MbarrierWait(&shared.v_empty[at.index], at.parity ^ 1);
      MbarrierArriveExpectTx(&shared.v_full[at.index], kVBoxes * kKVBox);
      for (int b = 0; b < kVBoxes; ++b)
        TmaLoad(shared.v[at.index] + b * kKVBox, v_map, &shared.v_full[at.index], b * kBoxColumns, j * kKeys, head,
                batch);
    }
    at.Next();
  }

  // To the warp whose turn it is: a box of V, or that there are no more.
  __device__ __forceinline__ void Land(bool more) {
    MbarrierWait(&shared.transposed[landing.index], landing.parity ^ 1);
    shared.more[landing.index] = more;
    MbarrierArriveExpectTx(&shared.landed[landing.index], more ? kKVBox : 0);
  }
  __device__ __forceinline__ void EndLanding() {
    for (int w = 0; w < kTransposers; ++w) Land(false), landing.Next();
  }

  // Hands the tile to all consumers, with Q. (Lists leave no registers to unroll it.)
  __device__ __forceinline__ void LoadQ(const Tile& tile, bool empty) {
#pragma unroll(kBlockMask ? 1 : kRowGroups)
    for (int w = 0; w < kRowGroups; ++w) {
      MbarrierWait(&shared.q_empty[q.Index()][w], q.Parity() ^ 1);
      shared.tile[q.position][w] = tile;
      MbarrierArriveExpectTx(&shared.q_full[q.Index()][w], empty ? 0 : kQKBoxes * kQBox);
      for (int b = 0; !empty && b < kQKBoxes; ++b)
        TmaLoad(shared.q[q.Index()][w] + b * kQBox, q_map, &shared.q_full[q.Index()][w], b * kBoxColumns,
                tile.row + 64 * w, tile.head, tile.batch);
    }
    q.Next();
  }

  __device__ __forceinline__ void Run() {
    if constexpr (kScout) {
      RunListed(Found{shared});
    } else if constexpr (kBlockMask) {
      RunListed(Lookup{p});
    } else {
      Schedule<> schedule;
      Tile tile;
      while (Next(p, &schedule, &tile)) Load(tile);
    }
    LoadQ({-1}, true);
    if (kTF32) EndLanding();
  }

  __device__ __forceinline__ void Load(const Tile& tile) {
    const bool empty = tile.visible.any_lo == tile.visible.any_hi;
    const int kv_head = tile.head / (p.q_heads / p.kv_heads);
    if (!empty) LoadK(at, tile.visible.any_hi - 1, kv_head, tile.batch);
    LoadQ(tile, empty);
    for (int j = tile.visible.any_hi - 1; j >= tile.visible.any_lo; --j) {
      if (j > tile.visible.any_lo) LoadK(at.After(), j - 1, kv_head, tile.batch);
      LoadV(j, kv_head, tile.batch);
    }
  }

  // With a block mask: all tiles that a Lookup or Found has.
  template <typename List>
  __device__ __forceinline__ void RunListed(List list) {
    while (list.NextTile()) {
      const Tile& tile = list.Here();
      const int kv_head = tile.head / (p.q_heads / Fresh(p.kv_heads)), batch = tile.batch;
      ListedTile keys = list.NextKeys();
      if (keys.There()) LoadK(at, keys.J(), kv_head, batch, keys);
      LoadQ(tile, !keys.There());
      while (keys.There()) {
        const int j = keys.J();
        keys = keys.Last() ? ListedTile{} : list.NextKeys();
        if (keys.There()) LoadK(at.After(), keys.J(), kv_head, batch, keys);
        LoadV(j, kv_head, batch);
      }
    }
  }
};

// f32: a warp that transposes every kTransposers-th box of V. It waits for the others' boxes too, and says that it has
// seen them, so as to be neither a lap ahead of a barrier nor one behind. (That it looks at v_empty for its own boxes
// alone is enough because K of the next tile comes before V of this one.)
struct Transposer {
  ForwardShared& shared;
  Ring<kLandings> landing;
  Ring<kStages> v;

  __device__ __forceinline__ void Run() {
    const int lane = threadIdx.x % 32;
    int turn = threadIdx.x / 32 - 1;  // the boxes until the next of this warp's
    for (int box = 0;; ++box, --turn, landing.Next()) {
      if (box == kVBoxes) box = 0, v.Next();
      MbarrierWait(&shared.landed[landing.index], landing.parity);
      SyncWarp();
      if (turn > 0) {
        MbarrierArrive(&shared.transposed[landing.index], ArrivesForWarp(lane));
        continue;
      }
      if (!shared.more[landing.index]) return;
      MbarrierWait(&shared.v_empty[v.index], v.parity ^ 1);
      TransposeBox<kCols, kConsumers == 2 ? 16 : 8>(shared.landing[landing.index],
                                                    shared.v[v.index] + box * kBoxColumns * 128, kTransposedBox);
      FenceProxyAsync();
      SyncWarp();
      MbarrierArrive(&shared.v_full[v.index], ArrivesForWarp(lane));
      MbarrierArrive(&shared.transposed[landing.index], ArrivesForWarp(lane));
      turn = kTransposers;
    }
  }
};

}  // namespace jax_flash
