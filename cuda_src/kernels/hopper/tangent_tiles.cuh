// The tiles of the Hopper tangent pass, and their layout in shared memory.
#pragma once

#include "hopper/cleared_rows.cuh"
#include "hopper/row_tiles.cuh"
#include "hopper/tangent_tuning.cuh"

namespace jax_flash::hopper::tangent {

constexpr int kQKBoxes = Boxes(kQKDim), kVBoxes = Boxes(kVDim);
using SharedQ = SharedTile<kBoxRows, kQKBoxes>;  // of the 64 rows of a warpgroup
using SharedK = SharedTile<kKeys, kQKBoxes>;
using SharedV = SharedTile<kKeys, kVBoxes>;

// The bytes of what is loaded at a time. Without a tangent of the scores V is not needed.
constexpr int kQBytes = SharedQ::kBytes * (kQueryMoves ? 2 : 1);
constexpr int kKBytes = SharedK::kBytes * (kKeyMoves ? 2 : 1);
constexpr int kVBytes = SharedV::kBytes * (int(kScoresMove) + int(kValueMoves));
// A further box of ones follows each tile of V. Its first columns belong to the right operand of E_dot V, so that A has
// the row sums of E_dot, too. Not with dropout, whose mu is without Z, nor where V does not fill its last box.
constexpr bool kSumsInA = kScoresMove && !kDropout && kVDim % kBoxColumns == 0;
constexpr int kAColumns = kVDim + (kSumsInA ? 8 : 0);
constexpr int kOnesBytes = kSumsInA ? SharedV::kBox : 0;
constexpr int kRoomForQ = 226 * 1024 - kStages * (kKBytes + kVBytes + kOnesBytes);
constexpr int kQBuffers = 2 * kConsumers * kQBytes > kRoomForQ ? 1 : 2;

template <bool kPresent, int kCount, int kBytes>
struct alignas(kPresent ? 1024 : 1) Tiles {
  uint8_t tile[kPresent ? kCount : 1][kPresent ? kBytes : 1];
  __device__ __forceinline__ uint8_t* operator[](int i) { return tile[i]; }
};

struct Shared {
  Tiles<true, kQBuffers * kConsumers, SharedQ::kBytes> q;  // by buffer and warpgroup
  Tiles<kQueryMoves, kQBuffers * kConsumers, SharedQ::kBytes> q_tangent;
  Tiles<true, kStages, SharedK::kBytes> k;
  Tiles<kKeyMoves, kStages, SharedK::kBytes> k_tangent;
  Tiles<kScoresMove, kStages, SharedV::kBytes + kOnesBytes> v;
  Tiles<kValueMoves, kStages, SharedV::kBytes> v_tangent;
  uint64_t q_full[kQBuffers][kConsumers], q_empty[kQBuffers][kConsumers];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  QTile tile[2 * kQBuffers][kConsumers];     // comes with q, stays until the next tile's q goes
  ListedTile listed[kListed ? kStages : 1];  // comes with k
  ClearingBarrier uncleared;                 // for loads of V with rows that the producer clears
};

static_assert(sizeof(Shared) <= 227 * 1024);

}  // namespace jax_flash::hopper::tangent
