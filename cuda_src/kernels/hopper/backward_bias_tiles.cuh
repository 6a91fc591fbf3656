// The tiles of Hopper's dbias pass, their order, and their layout in shared memory.
#pragma once

#include "hopper/backward_bias_tuning.cuh"
#include "hopper/bias_tiles.cuh"
#include "hopper/cleared_rows.cuh"
#include "hopper/shared_tile.cuh"
#include "ptx/warp.cuh"
#include "scheduler/bias_sums.cuh"
#include "scheduler/ranges.cuh"
#include "scheduler/schedule.cuh"

namespace jax_flash::hopper::dbias {

static_assert(kTiling.family == Family::kHopper && kBias && !kTF32);
static_assert(!kMask);  // a mask operand has been converted to a block mask
constexpr int kRows = kTiling.rows;
constexpr int kKeys = kTiling.cols;
constexpr int kStages = kTiling.stages;     // pairs of tiles in flight
constexpr int kConsumers = kTiling.groups;  // warpgroups
static_assert(kRows == 64 * kConsumers && kKeys % 32 == 0 && kKeys <= 128);
constexpr int kThreads = kWarpgroup * (kConsumers + 1);

constexpr int kQKBoxes = Boxes(kQKDim), kVBoxes = Boxes(kVDim);
constexpr int kMaxBoxes = kQKBoxes > kVBoxes ? kQKBoxes : kVBoxes;
using SharedRows = SharedTile<kRows, kMaxBoxes>;  // of Q or dO
using SharedKeys = SharedTile<kKeys, kMaxBoxes>;  // of K or V

// A tile of dbias, or one part of its sums.
struct DBiasTile {
  int batch, head;  // 0 if the bias is broadcast over them
  int row, column, part;
};

// The tiles of a CTA, over all heads and batch entries of dbias. Concurrent CTAs have neighbouring tiles, which share
// tiles of Q and dO, or of K and V. Causal tiles come in pairs with the same total work.
struct DBiasTiles {
  const Params& p;
  StaticSchedule<> schedule;

  // The number of batch entries and heads of dbias, and the number that is summed over. Computed for each tile, to save
  // registers.
  __device__ __forceinline__ Dimension Batch() const { return {Opaque(p.batch), p.bias.batch != 0}; }
  __device__ __forceinline__ Dimension Head() const { return {Opaque(p.q_heads), p.bias.head != 0}; }

  // Finds the next tile. Returns false at the end.
  __device__ __forceinline__ bool Next(DBiasTile* tile) {
    const int heads = Head().Own(), columns = (Opaque(p.kv_len) + kKeys - 1) / kKeys;
    const int tiles = (Opaque(p.q_len) + kRows - 1) / kRows * columns, parts = Opaque(p.parts);
    int item, t;
    if (!schedule.Next(Batch().Own() * heads * parts, tiles, &item, &t)) return false;
    const int head = item / parts;
    *tile = {head / heads, head % heads, t / columns * kRows, t % columns * kKeys, item % parts};
    return true;
  }
};

// A tile of S of this batch entry and head, which contributes to a tile of dbias.
struct Step {
  int batch, head;  // batch < 0: no more tiles of S
  int kind;         // of the block of a block mask
  bool masked;      // do entries need masks?
};

// The number of tiles of the bias in shared memory. dbias occupies one until TMA has stored it.
constexpr int kMaxShared = 227 * 1024;
constexpr int kTileBytes = kStages * (SharedRows::kBytes + SharedKeys::kBytes);
constexpr int kBiasStages = kTileBytes + 2 * kBiasTile <= kMaxShared - 1024 ? 2 : 1;

struct Shared {
  // Q and K (for S) alternate with dO and V (for dP).
  alignas(1024) uint8_t rows[kStages][SharedRows::kBytes];
  alignas(1024) uint8_t keys[kStages][SharedKeys::kBytes];
  // The tile of the bias, which all contributing tiles of S share.
  alignas(kBiasTiles ? 1024 : 1) uint8_t bias[kBiasStages][kBiasTiles ? kBiasTile : 1];
  alignas(16) Step step[kStages];  // comes with Q and K, or alone at the end
  DBiasTile tile[kStages];         // the step's tile of dbias; column < 0: no more tiles
  uint64_t full[kStages], empty[kStages];
  uint64_t bias_full[kBiasStages], bias_empty[kBiasStages];
  ClearingBarrier uncleared;  // for loads of V with rows that the producer clears
};
static_assert(sizeof(Shared) <= kMaxShared);

}  // namespace jax_flash::hopper::dbias
