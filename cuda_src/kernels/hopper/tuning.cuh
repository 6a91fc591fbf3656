// What Hopper's kernels do otherwise than their algorithms say, for the compiler's sake or as measurements had it: one
// struct a kernel, each field with its reason. docs/design has the figures.
#pragma once

#include "ptx/compiler.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash {

static_assert(!kMask);  // a mask operand has become a block mask

struct ForwardTuning {
  static constexpr int kRows = kTiling.rows, kConsumers = kTiling.groups;
  static constexpr int kCols = kTiling.cols * kRows / 64 / kConsumers;  // of S in a warpgroup

  // Registers a thread; together what the kernel starts with.
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kListed || kTF32 ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 2   ? (504 - kProducerRegisters) / 2
                                            : kConsumers == 3 ? 160
                                                              : 112;

  // Is the first tile to be computed, the last that the rows see, masked at any rate? To ask takes registers that with
  // segments are not there for wide heads or TF32, and with dropout and narrow heads more time than it saves.
  static constexpr bool kFirstMasked =
      !kListed && (kCausal || kWindow || (kSegments && (kTF32 || kVDim > 128)) || (kDropout && kVDim <= 64));

  // Do the warps ask whether their rows see all of a masked tile? They often do where others do not, and of a block
  // that a window crosses a warpgroup's half of the keys may be whole. With segments and dropout that costs more than
  // it saves.
  static constexpr bool kVote = (kSegments ? !kDropout : kListed) && kCols % 32 == 0;

  // Are a tile's masks put together before S needs registers, rather than when S is there and memory has answered?
  static constexpr bool kEarlyMasks = kSegments || kMaskMod || (kDropout && kCols == 128);

  // Where ptxas must not work ahead, since it would spill registers (Never): between 32 keys each of a tile of a bias.
  static constexpr bool kBiasInParts = kSoftCap && kDropout;

  // Keys of V in registers at a time where it is transposed: as many as there is room for.
  static constexpr int kTransposedAtOnce = kConsumers == 2 ? 16 : 8;
};

// kPairs: of CTAs share dQ; kSameKeys: both warpgroups have the same 64 keys.
template <bool kPairs, bool kSameKeys>
struct BackwardTuning {
  static constexpr int kRows = kTiling.rows;
  static constexpr bool kAlongside = kTiling.alongside;
  static constexpr bool kNarrow = kQKDim <= 64 && kVDim <= 64;  // dK and dV take few registers

  // Of 504 for the three warpgroups. A block mask beside other masks or large tiles is more to keep track of, as are
  // tiles of a bias; and a warp that transposes has 32 entries a lane at a time. A soft cap leaves large tiles least.
  static constexpr bool kTracksMuch =
      kTF32 || (kNarrow && kTiling.bias_tiles) || (!kPairs && kListed && (kRows == 128 || kCausal || kLocal));
  static constexpr int kProducerRegisters = kTracksMuch                                                     ? 56
                                            : kSoftCap && (kRows == 128 || (kBias && !kListed && !kNarrow)) ? 24
                                                                                                            : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;

  // dV += P^T dO can start before dS is known where there are registers for P in both precisions.
  static constexpr bool kEarlyDV = kRows == 64;
  // The slopes of the soft cap, or of a score_mod where they depend on the score, are kept where dS will be, and join P
  // once dV has it: unless they may be negative, where dropout marks P by its sign, or gradients of captured arrays are
  // sums of dS without them. Then they join dS. Pairs, and block masks of wide heads, leave no registers for those of
  // the soft cap: they are found again from P, which has nothing else in it there.
  static constexpr bool kFindsSlopes =
      kSoftCap && !kAddsToScores && (kRows == 128 || kPairs || (kListed && kQKDim > 96));
  static constexpr bool kKeepsSlopes = (kSoftCap && !kFindsSlopes) || kScoreSlopes;
  static constexpr bool kSlopesJoinP = !kCapturedGradients && !(kScoreSlopes && kDropout);

  // S^T can start at -L / scale: then nobody waits for L, and the subtraction costs nothing. With 128 rows to fetch it
  // costs more than it saves. (To start at 0 explicitly tells the compiler that S was not needed before.)
  static constexpr bool kStart = kRows == 64 && !(kTF32 && kSameKeys), kStartAtL = kStart && !kFormsScores;

  // To form scores entry by entry takes registers: dP has to wait for its own, ...
  static constexpr bool kLateDP = kFormsScores && kRows == 64 && !kNarrow;
  // ... memory is asked which rows a key sees when S is there, as beside these masks of wide heads, ...
  static constexpr bool kLateLook = kLateDP || (kRows == 64 && kQKDim > 96 && (kCausal || kLocal));
  // (with 128 rows, what it has answered is put together at once; a mask_mod is asked while the tensor cores are at
  // work)
  static constexpr bool kFoldsWords = kListed && kRows == 128, kEarlyMasks = kMaskMod;
  // ... and a bias, or what a score_mod looks up, has to be looked up a few entries at a time.
  static constexpr bool kBiasInParts =
      kAddsToScores && !kTiling.bias_tiles && (kPairs || (kBias && (kSoftCap || (kListed && kDropout && kQKDim > 96))));

  // dQ is computed a step behind: then no warpgroup waits for the other's dS, and one can be at its products while the
  // other is at its exponentials. Not where there are no registers to keep track of it.
  static constexpr bool kCrowdedMod = kScoreMod && (kBias || kScoreSlopes || kCapturedGradients);
  static constexpr bool kBehind =
      kDQ && (kRows == 128 || kNarrow ||
              !(kDropout || kSoftCap || kSegments || kCrowdedMod || (kListed && (kBias || kCausal || kWindow))));
  // Whether the first step of a tile, which has no dQ yet, has code of its own: 2 to 4% faster. But with a causal mask
  // at most, ptxas compiles the loop over the other steps differently, up to 2.5% slower; and other head dims spill.
  static constexpr bool kOwnFirst =
      kBehind && kRows == 128 && kQKDim == 64 && kVDim == 64 && (kLocal || kDropout || kListed);
  // What a step is, which is asked twice for want of registers, is asked the second time when dQ has left.
  static constexpr bool kAskedLate = kRows == 128 || kListed;

  // Whether positions and segments are not looked at in tiles of which a block's own bits say all. Dropout and a bias
  // leave wide heads no registers for that.
  static constexpr bool kToldOfBlocks = kListed && (kPairs || kQKDim <= 96 || !(kDropout || kBias));

  // Whether all threads commit what one of them has stored of dV and dK. It costs nothing, and ptxas makes another loop
  // over the tiles of Q of it: 2 to 6% faster, but 5% slower at head dim 128 if dQ is a step behind; with a block mask
  // it may find too few registers for wgmmas in flight, and with dropout and 128 rows it spills some.
  static constexpr bool kAllCommit = !kListed && (kRows == 128 ? !kDropout : !kBehind || (kQKDim <= 96 && kVDim <= 96));

  // The scale is read in every step, or with these masks registers would be spilled.
  static constexpr bool kLateScale =
      !kFormsScores && !kAlongside && kRows == 64 && kListed && kQKDim > 96 && !kDropout && !kCausal && !kWindow;

  // Where ptxas must not work ahead, since it would spill registers (Never): between masks and exponentials, ...
  static constexpr bool kStopAfterMask = (kPairs && !kBias && (kSoftCap || kSegments || kDropout || kManyRanges)) ||
                                         ((kScoreMod || (kMaskMod && kSoftCap)) && !kNarrow);
  // ... between the exponentials of the first half of the rows and the next, whose L is not read before, ...
  static constexpr bool kStopInSoftmax =
      kRows == 128 ? kDropout && !kAlongside
                   : kQKDim > 96 && !kTF32 &&
                         (kTiling.bias_tiles || (kBias && kSoftCap) || (kListed && !kBias && (kSoftCap || !kDropout)));
  // ... before the words of dropout, ...
  static constexpr bool kStopBeforeZ = kDropout && (kFormsScores || kMaskMod);
  // ... and before the last of these.
  static constexpr bool kStopInZ = kDropout && kRows == 128;
};

struct BackwardBiasTuning {
  static constexpr bool kNarrow = kTiling.cols < 128;

  // Of 504 for the three warpgroups. A consumer's sum, S and dP take 192, or half of it of narrow tiles, which windows,
  // segments and soft caps have for the sake of the producer.
  static constexpr int kProducerRegisters = kNarrow ? 88 : kManyRanges ? 56 : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;

  // dP has to wait for its registers until masks have hidden what they hide.
  static constexpr bool kLateDP = kManyRanges && !kNarrow;

  // Where ptxas must not work ahead, since it would spill registers (Never): between what memory says of masks and the
  // exponentials, before the words of dropout,
  static constexpr bool kStopAfterMask = kLookedUp, kStopBeforeZ = kDropout;
  // and between every 8 entries of a bias that is looked up.
  static constexpr bool kBiasInParts = !kTiling.bias_tiles;
};

}  // namespace jax_flash
