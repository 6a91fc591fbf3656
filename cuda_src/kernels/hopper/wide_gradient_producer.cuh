// The tiles of the Hopper backward for wide heads in shared memory, and the warp that loads them.
#pragma once

#include "hopper/shared_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "scheduler/ranges.cuh"
#include "scheduler/schedule.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper::wide_gradient {

static_assert(kTiling.family == Family::kHopper && kElementBytes == 2);
static_assert(!kAddsToScores && !kMask && !kListed && !kUnrounded && !kDropout && kQKDim <= 512 && kVDim <= 512);
static_assert(kTiling.groups == 2 && kTiling.rows == 64 && kTiling.cols == 64);
constexpr int kConsumers = 2;                 // warpgroups
constexpr int kLines = 64;                    // rows of a CTA, or keys; also of each streamed tile
constexpr int kCluster = kBackwardKeys / 64;  // CTAs with neighbouring lines and the same streamed tiles
constexpr int kThreads = kWarpgroup * (kConsumers + 1);
static_assert(kCluster == 2 && kLines * kCluster <= kRowPadding);
using Box = SharedTile<kLines, 1>;
constexpr int kSlotBoxes = 2;  // boxes in a slot of the ring
using Slot = SharedTile<kLines, kSlotBoxes>;

__host__ __device__ constexpr int SlotsOf(int boxes) { return (boxes + kSlotBoxes - 1) / kSlotBoxes; }

enum class Gradient { kQuery, kKey, kValue };

// The arrays of a kernel for one gradient.
template <Gradient kOf>
struct Arrays {
  static constexpr bool kTransposed = kOf != Gradient::kQuery;  // are lines keys?
  static constexpr bool kDS = kOf != Gradient::kValue;          // does it need dP and dS?
  static constexpr int kDim = kDS ? kQKDim : kVDim;             // of the gradient
  // Boxes of the operands of S, and of dP.
  static constexpr int kSBoxes = Boxes(kQKDim), kDPBoxes = kDS ? Boxes(kVDim) : 0;
  static constexpr int kHalfBoxes = (Boxes(kDim) + 1) / 2;  // of the gradient, for a warpgroup
  // The resident tiles. In the end the gradient takes their place.
  static constexpr int kResidentBoxes = kSBoxes + kDPBoxes > 2 * kHalfBoxes ? kSBoxes + kDPBoxes : 2 * kHalfBoxes;
  static constexpr int kSlots = (224 * 1024 / Box::kBytes - kResidentBoxes - 1) / kSlotBoxes;
};

// The lines of a cluster, and the tiles that they see.
struct Item {
  int line, head, batch;  // line < 0: there are no more items
  Visible tiles;          // of each head of the streamed arrays
};

// A streamed tile.
struct Place {
  int head, tile;

  __device__ __forceinline__ void Next(const Item& item) {
    if (++tile == item.tiles.any_hi) tile = item.tiles.any_lo, ++head;
  }
};

template <Gradient kOf>
struct Shared {
  using Of = Arrays<kOf>;
  alignas(1024) uint8_t resident[Of::kResidentBoxes * Box::kBytes];
  alignas(1024) uint8_t slots[Of::kSlots][Slot::kBytes];
  alignas(1024) uint8_t operand[Box::kBytes];  // P or dS
  Item item;                                   // comes with the resident tiles
  uint64_t resident_full, resident_empty;
  uint64_t full[kConsumers][Of::kSlots], empty[Of::kSlots];
  uint64_t uncleared;  // for boxes with rows that the producer clears
};
static_assert(sizeof(Shared<Gradient::kQuery>) <= 227 * 1024 && sizeof(Shared<Gradient::kValue>) <= 227 * 1024);

__device__ __forceinline__ int GroupOf(const Params& p) { return p.q_heads / p.kv_heads; }

// The number of streamed tiles of an item, and the first of them.
template <bool kTransposed>
__device__ __forceinline__ int TilesOf(const Params& p, const Item& item) {
  return (item.tiles.any_hi - item.tiles.any_lo) * (kTransposed ? GroupOf(p) : 1);
}
template <bool kTransposed>
__device__ __forceinline__ Place FirstPlace(const Params& p, const Item& item) {
  return {kTransposed ? item.head * GroupOf(p) : item.head / GroupOf(p), item.tiles.any_lo};
}
__device__ __forceinline__ bool IsMasked(const Item& item, int tile) {
  return tile < item.tiles.every_lo || tile >= item.tiles.every_hi;
}

// Finds the next item. At the end its line is -1, and it has no tiles.
template <bool kTransposed>
__device__ __forceinline__ Item NextItem(const Params& p, StaticSchedule<kCluster>* schedule) {
  constexpr int kClusterLines = kLines * kCluster;
  const int heads = kTransposed ? p.kv_heads : p.q_heads, length = kTransposed ? p.kv_len : p.q_len;
  int head, t;
  if (!schedule->Next(p.batch * heads, (length + kClusterLines - 1) / kClusterLines, &head, &t)) return {-1};
  const int batch = head / heads, line = t * kClusterLines, end = min(line + kClusterLines, length);
  const Positions positions = PositionsOf(p, batch);
  const Visible x = kTransposed ? RowsOf(p, positions, batch, line, end) : KeysOf(p, positions, batch, line, end);
  const int first = x.any_lo / kLines;
  return {line,
          head % heads,
          batch,
          {first, x.any_lo < x.any_hi ? (x.any_hi + kLines - 1) / kLines : first, (x.every_lo + kLines - 1) / kLines,
           x.every_hi / kLines}};
}

// The warp that loads all tiles. The first lane waits and loads, all lanes clear rows. The streamed boxes come in the
// order in which the consumers multiply: first the operands of S and dP of tile t, then the right operand of the
// gradient's product for tile t - 1.
template <Gradient kOf>
struct Producer {
  using Of = Arrays<kOf>;
  const Params& p;
  Shared<kOf>& shared;
  const TensorMap *x, *y;                     // resident: X and Y
  const TensorMap *with_x, *with_y, *factor;  // streamed: the other operand of S, of dP, and of the gradient
  const int lane = threadIdx.x % 32;
  const Item& item = shared.item;  // the current one
  uint32_t resident_parity = 0, uncleared_parity = 0;
  Ring<Of::kSlots> at;

  __device__ __forceinline__ void Run() {
    StaticSchedule<kCluster> schedule;
    while (true) {
      SyncWarp();  // all lanes have read the item before
      if (lane == 0) LoadResident(NextItem<Of::kTransposed>(p, &schedule));
      resident_parity ^= 1;
      SyncWarp();
      if (item.line < 0) return;
      const int tiles = TilesOf<Of::kTransposed>(p, item);
      Place place = FirstPlace<Of::kTransposed>(p, item), before = place;
#pragma unroll 1
      for (int t = 0; t <= tiles; ++t, before = place, place.Next(item)) {
        if (t < tiles) LoadFactorsOfScores(place, t % 2);
        if (t > 0) LoadFactor(before, (t - 1) % 2);
      }
    }
  }

 private:
  __device__ __forceinline__ void LoadResident(const Item& next) {
    MbarrierWait(&shared.resident_empty, resident_parity ^ 1);
    shared.item = next;
    const bool empty = item.tiles.any_lo == item.tiles.any_hi;
    MbarrierArriveExpectTx(&shared.resident_full, empty ? 0 : (Of::kSBoxes + Of::kDPBoxes) * Box::kBytes);
    if (empty) return;
    const int line = item.line + kLines * ClusterRank();
    const SharedTile<kLines, Of::kSBoxes> to{shared.resident};
    to.Load(x, &shared.resident_full, line, item.head, item.batch);
    if constexpr (Of::kDS) {
      const SharedTile<kLines, Of::kDPBoxes> to_y{to.Box(Of::kSBoxes)};
      to_y.Load(y, &shared.resident_full, line, item.head, item.batch);
    }
  }

  // Loads the operands of S and dP, for one warpgroup.
  __device__ __forceinline__ void LoadFactorsOfScores(const Place& place, int warpgroup) {
#pragma unroll 1
    for (int b = 0; b < Of::kSBoxes; b += kSlotBoxes, at.Next())
      LoadSlot(with_x, b, min(kSlotBoxes, Of::kSBoxes - b), place, warpgroup);
#pragma unroll 1
    for (int b = 0; b < Of::kDPBoxes; b += kSlotBoxes, at.Next())
      LoadSlot(with_y, b, min(kSlotBoxes, Of::kDPBoxes - b), place, warpgroup);
  }

  // Loads the right operand of the gradient's product. Each warpgroup has half of the columns.
  __device__ __forceinline__ void LoadFactor(const Place& place, int owner) {
    const uint64_t hidden = HiddenRows(place);
#pragma unroll 1
    for (int s = 0; s < 2 * SlotsOf(Of::kHalfBoxes); ++s, at.Next()) {
      const int warpgroup = owner ^ s % 2, box = s / 2 * kSlotBoxes;
      const int boxes = min(kSlotBoxes, Of::kHalfBoxes - box), first = warpgroup * Of::kHalfBoxes + box;
      if (hidden == 0) {
        LoadSlot(factor, first, boxes, place, warpgroup);
      } else {
        LoadAndClear(hidden, first, boxes, place, warpgroup);
      }
    }
  }

  // Loads boxes to a slot of both CTAs. Each CTA loads one of them.
  __device__ __forceinline__ void LoadSlot(const TensorMap* map, int first, int boxes, const Place& place,
                                           int warpgroup) {
    if (lane > 0) return;
    MbarrierWait(&shared.empty[at.index], at.parity ^ 1);
    uint64_t* const full = &shared.full[warpgroup][at.index];
    MbarrierArriveExpectTx(full, boxes * Box::kBytes);
    const Slot to{shared.slots[at.index]};
    const int row = place.tile * kLines;
    const int b = ClusterRank();
    if (b < boxes) TmaLoadToPair(to.Box(b), map, full, (first + b) * kBoxColumns, row, place.head, item.batch);
  }

  // The rows of a streamed tile that must be replaced by zeros, one bit each. Their P is 0, but 0 times a NaN is NaN.
  // They are keys beyond the length. Or they are empty rows of Q and dO. Without masks, a row is empty only if its
  // scores are -inf.
  __device__ __forceinline__ uint64_t HiddenRows(const Place& place) const {
    const int row = place.tile * kLines;
    if constexpr (!Of::kTransposed) {
      if (!kProblem.kv_lengths) return 0;
      const int present = int(PositionsOf(p, item.batch).kv_length) - row;
      return present >= kLines ? 0 : ~uint64_t(0) << max(present, 0);
    } else {
      if (!kEmptyRows || !IsMasked(item, place.tile)) return 0;
      const float* const minus_l =
          p.logsumexp + (int64_t(item.batch) * p.q_heads + place.head) * PaddedRows(p) + row + lane;
      const uint32_t low = __ballot_sync(0xFFFFFFFF, minus_l[0] == -Infinity());
      const uint32_t high = __ballot_sync(0xFFFFFFFF, minus_l[32] == -Infinity());
      return uint64_t(high) << 32 | low;
    }
  }

  // Each CTA loads its own boxes, and clears these rows of them.
  __device__ __forceinline__ void LoadAndClear(uint64_t rows, int first, int boxes, const Place& place, int warpgroup) {
    const Slot to{shared.slots[at.index]};
    if (lane == 0) {
      MbarrierWait(&shared.empty[at.index], at.parity ^ 1);
      MbarrierArriveExpectTx(&shared.uncleared, boxes * Box::kBytes);
      for (int b = 0; b < boxes; ++b)
        TmaLoad(to.Box(b), factor, &shared.uncleared, (first + b) * kBoxColumns, place.tile * kLines, place.head,
                item.batch);
      MbarrierWait(&shared.uncleared, uncleared_parity);
    }
    uncleared_parity ^= 1;
    SyncWarp();
#pragma unroll 1
    for (int r = lane; r < boxes * kLines; r += 32) {
      if ((rows >> r % kLines & 1) == 0) continue;
      for (int i = 0; i < kBoxBytes / 16; ++i) reinterpret_cast<uint4*>(to.memory + r * kBoxBytes)[i] = {0, 0, 0, 0};
    }
    FenceProxyAsync();
    SyncWarp();
    MbarrierArrive(&shared.full[warpgroup][at.index], lane == 0);
  }
};

}  // namespace jax_flash::hopper::wide_gradient
