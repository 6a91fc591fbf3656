// Where the Hopper backward differs from its algorithm, for the compiler's sake or because measurements said so. Each
// field has its reason; docs/design has the figures.
#pragma once

#include "hopper/backward_shape.cuh"
#include "ptx/compiler.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper::backward {

struct Tuning {
  static constexpr bool kHeadDimsUpTo64 = kQKDim <= 64 && kVDim <= 64;  // dK and dV take few registers

  // Registers of a thread, of the 504 that the three warpgroups have together. The producer needs more where it has
  // much to keep track of: a block mask beside other masks or with large tiles, tiles of a bias, or a warp that
  // transposes, with 32 entries in each lane at a time. With a soft cap large tiles leave it the fewest.
  static constexpr bool kTracksMuch =
      kTF32 || (kHeadDimsUpTo64 && kTiling.bias_tiles) || (!kPairs && kListed && (kRows == 128 || kCausal || kLocal));
  static constexpr int kProducerRegisters = kTracksMuch ? 56
                                            : kSoftCap && (kRows == 128 || (kBias && !kListed && !kHeadDimsUpTo64))
                                                ? 24
                                                : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;

  // dV += P^T dO can start before dS is known where there are registers for P both in f32 and packed.
  static constexpr bool kEarlyDV = kRows == 64;
  // The slopes of the soft cap, or of a score_mod where they depend on the score, are kept in the registers of dS. P is
  // multiplied by them once dV's operand has been made of it (kSlopesJoinP). But dS is multiplied instead where slopes
  // may be negative and dropout marks P by its sign, or where gradients of captured arrays are sums of dS without
  // slopes. Pairs, and block masks of wide heads, have no registers to keep the slopes of a soft cap: there they are
  // found again from P, which is exp(s - L) and nothing else.
  static constexpr bool kFindsSlopes =
      kSoftCap && !kAddsToScores && (kRows == 128 || kPairs || (kListed && kQKDim > 96));
  static constexpr bool kKeepsSlopes = (kSoftCap && !kFindsSlopes) || kScoreSlopes;
  static constexpr bool kSlopesJoinP = !kCapturedGradients && !(kScoreSlopes && kDropout);

  // S^T can start at -L / scale. Then nobody waits for L, and subtracting it costs nothing. With 128 rows L takes
  // longer to fetch than that saves. (To start at 0 explicitly tells the compiler that the S before is not needed any
  // more.)
  static constexpr bool kStart = kRows == 64 && !(kTF32 && kSameKeys), kStartAtL = kStart && !kFormsScores;

  // To form scores entry by entry takes registers: so the product for dP has to wait, ...
  static constexpr bool kLateDP = kFormsScores && kRows == 64 && !kHeadDimsUpTo64;
  // ... memory is asked which rows a key sees when S is there, as beside these masks of wide heads, ...
  static constexpr bool kLateMasks = kLateDP || (kRows == 64 && kQKDim > 96 && (kCausal || kLocal));
  // (with a block mask and 128 rows, the answers are folded into words at once; a mask_mod is asked while the tensor
  // cores are at work)
  static constexpr bool kFoldsWords = kListed && kRows == 128, kEarlyMasks = kMaskMod;
  // ... and a bias, or what a score_mod looks up, has to be looked up a few entries at a time.
  static constexpr bool kBiasInParts =
      kAddsToScores && !kTiling.bias_tiles && (kPairs || (kBias && (kSoftCap || (kListed && kDropout && kQKDim > 96))));

  // dQ is computed a step behind. Then no warpgroup waits for the other's dS, and one can be at its products while the
  // other is at its exponentials. It is not done where there are no registers to keep track of it.
  static constexpr bool kModNeedsRegisters = kScoreMod && (kBias || kScoreSlopes || kCapturedGradients);
  static constexpr bool kBehind = kDQ && (kRows == 128 || kHeadDimsUpTo64 ||
                                          !(kDropout || kSoftCap || kSegments || kModNeedsRegisters ||
                                            kBiasDType == DType::kF64 || (kListed && (kBias || kCausal || kWindow))));
  // Whether the first step of a tile, which has no dQ yet, has code of its own. That is 2 to 4% faster. But with no
  // mask, or a causal one alone, ptxas compiles the loop over the other steps differently, up to 2.5% slower; and other
  // head dims spill.
  static constexpr bool kOwnFirst =
      kBehind && kRows == 128 && kQKDim == 64 && kVDim == 64 && (kLocal || kDropout || kListed);
  // What a step is, is read twice for want of registers. Is it read the second time only when dQ has left?
  static constexpr bool kAskedLate = kRows == 128 || kListed;

  // Are positions and segments left out in tiles where the bits of their block alone say what is seen? Dropout and a
  // bias leave wide heads no registers for that.
  static constexpr bool kToldOfBlocks = kListed && (kPairs || kQKDim <= 96 || !(kDropout || kBias));

  // Whether all threads commit the stores of dV and dK, though one of them has made them. That costs nothing in itself,
  // but ptxas then compiles the loop over the tiles of Q differently: 2 to 6% faster, but 5% slower at head dim 128 if
  // dQ is a step behind. With a block mask it may find too few registers to have wgmmas in flight, and with dropout and
  // 128 rows it spills some.
  static constexpr bool kAllCommit = !kListed && (kRows == 128 ? !kDropout : !kBehind || (kQKDim <= 96 && kVDim <= 96));

  // The scale is read in every step, or with these masks registers would be spilled.
  static constexpr bool kLateScale =
      !kFormsScores && !kAlongside && kRows == 64 && kListed && kQKDim > 96 && !kDropout && !kCausal && !kLocal;

  // Where ptxas must not move work ahead, since it would spill registers (Never): between masks and exponentials, ...
  static constexpr bool kStopAfterMask = (kPairs && !kBias && (kSoftCap || kSegments || kDropout || kManyRanges)) ||
                                         ((kScoreMod || (kMaskMod && kSoftCap)) && !kHeadDimsUpTo64);
  // ... between the exponentials of the first half of the rows and those of the second, so that L of the second half is
  // not read before, ...
  static constexpr bool kStopInSoftmax =
      kRows == 128 ? kDropout && !kAlongside
                   : kQKDim > 96 && !kTF32 &&
                         (kTiling.bias_tiles || (kBias && kSoftCap) || (kListed && !kBias && (kSoftCap || !kDropout)));
  // ... before the random words of dropout, ...
  static constexpr bool kStopBeforeZ = kDropout && (kFormsScores || kMaskMod);
  // ... and before the last of these.
  static constexpr bool kStopInZ = kDropout && kRows == 128;
};

}  // namespace jax_flash::hopper::backward
