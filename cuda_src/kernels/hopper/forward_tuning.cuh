// Where the Hopper forward differs from its algorithm because of the compiler, or because that is measurably faster.
// Each field has its reason; docs/design has the figures. ptxas "must not move work ahead" where that would spill
// registers; Never() stops it (ptx/compiler.cuh).
#pragma once

#include "hopper/forward_shape.cuh"
#include "ptx/compiler.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper::forward {

struct Tuning {
  // Registers of a thread. Their sum over all warpgroups is what the kernel starts with.
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kListed || kTF32 ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 2   ? (504 - kProducerRegisters) / 2
                                            : kConsumers == 3 ? 160
                                                              : 112;

  // Is the first tile, the rightmost one that the rows see, always masked, without a test whether that is needed? With
  // segments, wide heads and TF32 have no registers for the test. With dropout and narrow heads it takes more time than
  // it saves.
  static constexpr bool kFirstMasked =
      !kListed && (kCausal || kWindow || (kSegments && (kTF32 || kVDim > 128)) || (kDropout && kVDim <= 64));

  // Do warps vote whether their rows see all keys of a masked tile, and then skip masking? Often the rows of some warps
  // do while those of others do not. Or a window crosses a block, and the keys of one warpgroup are all visible. With
  // segments and dropout the vote costs more than it saves.
  static constexpr bool kVote = (kSegments ? !kDropout : kListed) && kWarpgroupKeys % 32 == 0;

  // Are the masks of a tile combined before S needs registers? Otherwise they are combined after S, when the loads have
  // arrived.
  static constexpr bool kEarlyMaskJoin = kSegments || kMaskMod || (kDropout && kWarpgroupKeys == 128);

  // ptxas must not move work ahead of the next 32 keys of a bias tile.
  static constexpr bool kBiasInParts = kSoftCap && kDropout;

  // Is P packed before warps vote whether to rescale O? The vote ends in a branch, and ptxas moves nothing across it:
  // packing before the branch fills the wait for O. Narrow heads wait less than packing takes, and with a bias or a
  // score_mod registers would spill.
  static constexpr bool kEarlyPack = kVDim > 64 && !kAddsToScores;

  // How many keys of V are in registers at a time while it is transposed: as many as fit.
  static constexpr int kTransposedAtOnce = kConsumers == 2 ? 16 : 8;
};

}  // namespace jax_flash::hopper::forward
