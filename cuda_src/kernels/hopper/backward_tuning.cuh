// Tuning of the Hopper backward: choices for the compiler, or by measurement. Each has its reason. docs/design has the
// figures. OpaqueFalse() (ptx/compiler.cuh) keeps ptxas from moving code ahead where that would spill.
#pragma once

#include "hopper/backward_shape.cuh"
#include "ptx/compiler.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::hopper::backward {

struct Tuning {
  static constexpr bool kHeadDimsUpTo64 = kQKDim <= 64 && kVDim <= 64;  // dK and dV need few registers

  // Registers per thread. The three warpgroups have 504 together. The producer needs more for a block mask with other
  // masks or with large tiles, for tiles of a bias, and for warps that transpose, with 32 entries in each lane. It has
  // the fewest if the consumers need the most: with a soft cap and large tiles, or a soft cap and a bias above head dim
  // 64.
  static constexpr bool kBusyProducer =
      kTF32 || (kHeadDimsUpTo64 && kTiling.bias_tiles) || (!kPairs && kListed && (kRows == 128 || kCausal || kLocal));
  static constexpr int kProducerRegisters = kBusyProducer ? 56
                                            : kSoftCap && (kRows == 128 || (kBias && !kListed && !kHeadDimsUpTo64))
                                                ? 24
                                                : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;

  // dV += P^T dO can start before dS is known, if there are registers for P both in f32 and packed.
  static constexpr bool kEarlyDV = kRows == 64;
  // The slopes of the soft cap, or of a score_mod if they depend on the score, are kept in the registers of dS. P is
  // multiplied by them after the operand of dV has been packed (kSlopesInP). In two cases dS is multiplied instead:
  // if slopes may be negative while the sign of P marks dropped entries, and if gradients of captured arrays are sums
  // of dS without slopes. Pairs, and block masks above head dim 96, have no registers for the slopes of a soft cap.
  // They recompute them from P = exp(s - L).
  static constexpr bool kRecomputesSlopes =
      kSoftCap && !kAddsToScores && (kRows == 128 || kPairs || (kListed && kQKDim > 96));
  static constexpr bool kKeepsSlopes = (kSoftCap && !kRecomputesSlopes) || kScoreSlopes;
  static constexpr bool kSlopesInP = !kCapturedGradients && !(kScoreSlopes && kDropout);

  // S^T can start at -L / scale. Then subtracting L is free, and nothing waits for L. With 128 rows, loading L first
  // costs more than that saves. Starting at an explicit 0 tells the compiler that the previous S is dead.
  static constexpr bool kInitializesS = kRows == 64 && !(kTF32 && kSameKeys),
                        kStartsAtL = kInitializesS && !kFormsScores;

  // Scores that are formed entry by entry need registers. Three choices save some. The product for dP starts late.
  static constexpr bool kLateDP = kFormsScores && kRows == 64 && !kHeadDimsUpTo64;
  // Masks in memory are loaded after S. Above head dim 96 the same holds with a causal or local mask.
  static constexpr bool kLateMaskFetch = kLateDP || (kRows == 64 && kQKDim > 96 && (kCausal || kLocal));
  // A bias, or an array that a score_mod captures, is loaded a few entries at a time.
  static constexpr bool kBiasInParts =
      kAddsToScores && !kTiling.bias_tiles && (kPairs || (kBias && (kSoftCap || (kListed && kDropout && kQKDim > 96))));

  // With a block mask and 128 rows, loaded bits are packed immediately. A mask_mod is evaluated while the tensor cores
  // compute.
  static constexpr bool kEarlyPackBits = kListed && kRows == 128, kEarlyCombineMasks = kMaskMod;

  // Is dQ computed one step behind? Then no warpgroup waits for the dS of another, and one can multiply while the other
  // computes exponentials. These features leave no registers for it.
  static constexpr bool kModNeedsRegisters = kScoreMod && (kBias || kScoreSlopes || kCapturedGradients);
  static constexpr bool kDelayedDQ =
      kDQ && (kPairs ? kQKDim <= 192 && kVDim <= 192 && !(kBias && kSoftCap) && !kOrdered
                     : kRows == 128 || kHeadDimsUpTo64 ||
                           !(kDropout || kSoftCap || kSegments || kModNeedsRegisters || kBiasDType == DType::kF64 ||
                             (kListed && (kBias || kCausal || kWindow))));
  // Does the first step of a kv tile, which has no dQ yet, have separate code? That is 2 to 4% faster. But without a
  // mask, or with only a causal mask, ptxas then compiles the loop over the other steps differently, up to 2.5% slower,
  // unless dQ is added in a fixed order. Other head dims spill.
  static constexpr bool kPeeledFirst =
      kDelayedDQ && kRows == 128 && kQKDim == 64 && kVDim == 64 && (kLocal || kDropout || kListed || kOrdered);
  // Is the second read of the step, which saves registers, after the addition of dQ?
  static constexpr bool kLateStepReread = kRows == 128 || kListed;

  // Are positions and segments skipped in tiles that are masked only by the bits of their block? Above head dim 96,
  // dropout or a bias leaves no registers for that.
  static constexpr bool kOnlyBlockBits = kListed && (kPairs || kQKDim <= 96 || !(kDropout || kBias));

  // Do all threads commit the stores of dV and dK, although only one of them stores? The commit is free, but ptxas then
  // compiles the loop over q tiles differently: 2 to 6% faster, but 5% slower at head dim 128 if dQ is one step behind
  // or added in a fixed order. With a block mask it may serialize wgmmas for lack of registers, and with dropout and
  // 128 rows it spills.
  static constexpr bool kAllThreadsCommit =
      !kListed && !kOrdered && (kRows == 128 ? !kDropout : !kDelayedDQ || (kQKDim <= 96 && kVDim <= 96));

  // Is the scale loaded in every step? These masks would spill otherwise.
  static constexpr bool kLateScale =
      !kFormsScores && !kFusedRows && kRows == 64 && kListed && kQKDim > 96 && !kDropout && !kCausal && !kLocal;

  // The last four are places where code must not move ahead. The first is before the exponentials, after the masks.
  static constexpr bool kStopAfterMask =
      (kPairs && !kBias && (kSoftCap || kSegments || kDropout || kMoreThanCausal || kOrdered)) ||
      ((kScoreMod || (kMaskMod && kSoftCap)) && !kHeadDimsUpTo64);
  // Before the exponentials of the second half of the rows, which would load their L earlier.
  static constexpr bool kStopInSoftmax =
      kRows == 128 ? kDropout && !kFusedRows
                   : kQKDim > 96 && !kTF32 &&
                         (kTiling.bias_tiles || (kBias && kSoftCap) || (kListed && !kBias && (kSoftCap || !kDropout)));
  // Before dropout's random words.
  static constexpr bool kStopBeforeZ = kDropout && (kFormsScores || kMaskMod);
  // Before the last of these words.
  static constexpr bool kStopInZ = kDropout && kRows == 128;
};

}  // namespace jax_flash::hopper::backward
