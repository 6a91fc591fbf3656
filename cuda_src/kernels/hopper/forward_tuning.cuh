// Tuning of the Hopper forward: choices for the compiler, or by measurement. Each has its reason. docs/design has the
// figures. OpaqueFalse() (ptx/compiler.cuh) keeps ptxas from moving code ahead where that would spill.
#pragma once

#include "hopper/forward_shape.cuh"
#include "ptx/compiler.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper::forward {

struct Tuning {
  // Registers per thread. Their sum over all warpgroups is the kernel's initial allocation.
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kListed || kTF32 ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 2   ? (504 - kProducerRegisters) / 2
                                            : kConsumers == 3 ? 160
                                                              : 112;

  // Is the first tile, the rightmost one that the rows see, always masked, without a test? With segments, head dims
  // above 128 and TF32 have no registers for the test. With dropout up to head dim 64, the test costs more time than it
  // saves.
  static constexpr bool kFirstMasked =
      !kListed && (kCausal || kWindow || (kSegments && (kTF32 || kVDim > 128)) || (kDropout && kVDim <= 64));

  // Do warps vote whether a masked tile is fully visible to their rows, and then skip masking? Often it is fully
  // visible to some warps only. Or warpgroups have different keys, and a window hides keys of the other one only. With
  // segments and dropout the vote costs more than it saves. It is only used where ToScores has nothing else to do.
  static constexpr bool kVote = (kSegments ? !kDropout : kListed) && kWarpgroupKeys % 32 == 0 &&
                                (!kFormsScores || (kTiling.bias_tiles && !kScoreMod));

  // Are the masks of a tile combined after S, when their loads have arrived? Otherwise they are combined before S needs
  // registers.
  static constexpr bool kCombineMasksLate =
      kMasksInMemory && !(kSegments || kMaskMod || (kDropout && kWarpgroupKeys == 128));

  // Code must not move ahead of the next 32 keys of a bias tile.
  static constexpr bool kBiasInParts = kSoftCap && kDropout;

  // Is P packed before warps vote whether to rescale O? The vote ends in a branch, and ptxas moves nothing across it.
  // So packing before the branch fills the wait for O. Up to head dim 64 this wait is shorter than packing takes. With
  // a bias or a score_mod, registers would spill.
  static constexpr bool kEarlyPack = kVDim > 64 && !kAddsToScores;

  // The number of keys of V in registers while V is transposed: the maximum that fits.
  static constexpr int kTransposedAtOnce = kConsumers == 2 ? 16 : 8;
};

}  // namespace jax_flash::hopper::forward
