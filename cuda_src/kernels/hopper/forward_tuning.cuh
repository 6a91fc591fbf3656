// Where the Hopper forward differs from its algorithm, for the compiler's sake or because measurements said so. Each
// field has its reason; docs/design has the figures.
#pragma once

#include "hopper/forward_shape.cuh"
#include "ptx/compiler.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper::forward {

struct Tuning {
  // Registers of a thread. Over all warpgroups they add up to what the kernel starts with.
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kListed || kTF32 ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 2   ? (504 - kProducerRegisters) / 2
                                            : kConsumers == 3 ? 160
                                                              : 112;

  // Is the first tile that is computed, which is the last that the rows see, masked without asking whether it has to
  // be? With segments, wide heads and TF32 have no registers to ask. With dropout and narrow heads asking takes more
  // time than it saves.
  static constexpr bool kFirstMasked =
      !kListed && (kCausal || kWindow || (kSegments && (kTF32 || kVDim > 128)) || (kDropout && kVDim <= 64));

  // Do warps vote whether their rows see all of a masked tile, and then hide nothing? Some warps' rows often do where
  // those of others do not; and where a window crosses a block, one warpgroup's half of the keys may be seen as a
  // whole. With segments and dropout the vote costs more than it saves.
  static constexpr bool kVote = (kSegments ? !kDropout : kListed) && kWarpgroupKeys % 32 == 0;

  // Are a tile's masks joined before S needs registers? Otherwise that is done when S is there, and memory has
  // answered.
  static constexpr bool kEarlyMasks = kSegments || kMaskMod || (kDropout && kWarpgroupKeys == 128);

  // Where ptxas must not move work ahead, since it would spill registers (Never): between each 32 keys of a tile of a
  // bias.
  static constexpr bool kBiasInParts = kSoftCap && kDropout;

  // Is P packed before warps vote whether to rescale O? The vote ends in a branch, and ptxas moves nothing across it:
  // packing before the branch fills the wait for O. Narrow heads wait less than the packing takes, and beside a bias or
  // a score_mod registers would be spilled.
  static constexpr bool kEarlyPack = kVDim > 64 && !kAddsToScores;

  // How many keys of V are in registers at a time where it is transposed: as many as there is room for.
  static constexpr int kTransposedAtOnce = kConsumers == 2 ? 16 : 8;
};

}  // namespace jax_flash::hopper::forward
