// A consumer warpgroup of the Hopper backward between its products: S^T and dP^T become P^T and dS^T, with scores,
// masks and dropout (Z).
#pragma once

#include "hopper/backward_captured.cuh"
#include "hopper/backward_products.cuh"

namespace jax_flash::hopper::backward {

// dS lacks the factor 1 / (1 - dropout rate). It is applied to dQ and dK at the end.
__device__ __forceinline__ float DQKScale(const Params& p) { return ZScale(p) * ScaleOf(p); }

static_assert(Tuning::kEarlyDV || !Tuning::kKeepsSlopes);
static_assert(!kTF32 || !Tuning::kKeepsSlopes);  // slopes are kept in the registers of dS, as 16 bits
static_assert(!kSoftCap || !kScoreSlopes);       // registers for only one kind of slopes
static_assert(!kSameKeys || !Tuning::kKeepsSlopes || Tuning::kSlopesInP);  // the other warpgroup receives only P

// Lines 12 to 15, 18 and 20 of Algorithm 4, on the transposes.
struct Probabilities : Products {
  const float to_log2;
  TileMask<true, kRows> tile_mask;

  __device__ __forceinline__ Probabilities(const Params& p, Shared& shared) : Products(p, shared), to_log2(ToLog2(p)) {}

  __device__ __forceinline__ View<true> ViewOf(const KVTile& tile, const Step& step) const {
    return {step.row + lane % 4 * 2, Key(tile)};
  }

  // Replaces S^T by scores s^T, entry by entry. Leaves slopes in the registers of dS.
  __device__ __forceinline__ void ToScores(const KVTile& tile, const Step& step) {
    SoftCapTanh(p, S);
#pragma unroll
    for (int i = 0; kSoftCap && Tuning::kKeepsSlopes && i < kRows / 4; ++i) dS[i] = PackSlopes(S[2 * i], S[2 * i + 1]);
    if (kBiasTiles) AddBias();
    FormScores(Score(p, tile.batch, step.head), ViewOf(tile, step));
  }

  // Adds the tile of the bias, which was loaded with Q.
  __device__ __forceinline__ void AddBias() {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) S[i] *= CapOrScale(p);
#pragma unroll
    for (int c = 0; c < kRows; c += 16)
      AddBiasTile<true>(shared.bias[at.index] + c * kBoxBytes, key_offset + 16 * warp, S + c / 2);
  }

  __device__ __forceinline__ void FormScores(const Score& score, const View<true>& view) {
    float slopes[2];
#pragma unroll
    for (int i = 0; kScoresByEntry && i < kRows / 2; ++i) {
      if (Tuning::kBiasInParts && i % 8 == 0 && OpaqueFalse()) return;
      const int h = i / 2 % 2, x = i / 4 * 2 + i % 2;
      if (!kBiasTiles) S[i] = score.BeforeMod(S[i], view.Row(h, x), view.Key(h, x));
      if (kScoreSlopes) slopes[i % 2] = score.Slope(S[i], view, h, x);
      if (kScoreSlopes && i % 2 == 1) dS[i / 2] = Pack(slopes[0], slopes[1]);
      S[i] = score.Mod<false>(S[i], view, h, x);
    }
  }

  // Starts to load the masks of this lane's keys, if they are in memory.
  __device__ __forceinline__ void FetchMasks(const KVTile& tile, const Step& step) {
    if (!kMasksInMemory || step.masks == Masks::kNone) return;
    const Block<true> block(p.block_mask, tile.batch, step.kind);
    tile_mask.FetchBlock(block, Key(tile), step.row);
    if (Tuning::kEarlyPackBits) tile_mask.PackBits();
    if (Tuning::kEarlyCombineMasks) CombineMasks(tile, step);
  }
  // Combines the masks that were loaded with the other masks.
  __device__ __forceinline__ void CombineMasks(const KVTile& tile, const Step& step) {
    if (!Tuning::kEarlyPackBits) tile_mask.PackBits();
    if (step.masks == Masks::kOnlyBlock) return;
    tile_mask.Intersect(PositionsOf(p, tile.batch), Entries(p, tile.batch, step.head), ViewOf(tile, step));
  }

  // Sets masked entries to -inf.
  __device__ __forceinline__ void ApplyMasks(const KVTile& tile, const Step& step) {
    if constexpr (kMasksInMemory) {
      if (Tuning::kLateMaskFetch) FetchMasks(tile, step);
      if (!Tuning::kEarlyCombineMasks) CombineMasks(tile, step);
      tile_mask.Apply(S);
    } else {
      MaskOutside(PositionsOf(p, tile.batch), ViewOf(tile, step), S);
    }
  }

  // Subtracts m from s^T in 16 rows.
  __device__ __forceinline__ void SubtractM(int c) {
    const float4 x = (reinterpret_cast<const float4*>(shared.minus_l[at.index][kSeparateMaximum]) + lane % 4)[4 * c];
    const float m[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) S[8 * c + i] -= m[i / 4 * 2 + i % 2];
  }

  // Masks S^T and replaces it by P^T.
  __device__ __forceinline__ void Softmax(const KVTile& tile, const Step& step) {
    if (kFormsScores) ToScores(tile, step);
    if (step.masks != Masks::kNone) ApplyMasks(tile, step);
    if (Tuning::kStopAfterMask && OpaqueFalse()) return;
    const float to_log2 = Tuning::kLateScale ? __ldg(p.scale + Opaque(0)) * kLog2e : this->to_log2;
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      if (Tuning::kStopInSoftmax && c == kRows / 32 && OpaqueFalse()) return;
      const float4 x = Tuning::kStartsAtL
                           ? float4()
                           : (reinterpret_cast<const float4*>(shared.minus_l[at.index][0]) + lane % 4)[4 * c];
      const float minus_l[4] = {x.x * to_log2, x.y * to_log2, x.z * to_log2, x.w * to_log2};
      if (kSeparateMaximum) SubtractM(c);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        S[8 * c + i] =
            Exp2(Tuning::kStartsAtL ? S[8 * c + i] * to_log2 : fmaf(S[8 * c + i], to_log2, minus_l[i / 4 * 2 + i % 2]));
      }
    }
    ApplyZ(tile, step);
  }

  // Negates the entries of P^T that dropout drops.
  __device__ __forceinline__ void ApplyZ(const KVTile& tile, const Step& step) {
    if (Tuning::kStopBeforeZ && OpaqueFalse()) return;
    const Seed seed(p, tile.batch, step.head);
    const int columns = tile.first_key / 16 + key_offset / 16 + warp;
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      if (Tuning::kStopInZ && c == kRows / 16 - 1 && OpaqueFalse()) return;
      MarkZ<true>(p, seed.Words(columns, (step.row / 16 + c) * 8 + lane / 4), S + 8 * c);
    }
  }

  // Packs P as an operand of dV. Then multiplies P by the slopes, if any, because from here on only dS needs P.
  __device__ __forceinline__ void PackP() {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      P[i] = PackKept(S[2 * i], S[2 * i + 1]);
      if (Tuning::kKeepsSlopes && Tuning::kSlopesInP) TimesSlopes(dS[i], &S[2 * i], &S[2 * i + 1]);
    }
    if (Tuning::kRecomputesSlopes) TimesSlopesOfP();
  }

  // Multiplies P by the slopes of its scores, which are recomputed from P and L.
  __device__ __forceinline__ void TimesSlopesOfP() {
    const float4* minus_l = reinterpret_cast<const float4*>(shared.minus_l[at.index][0]) + lane % 4;
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      const float4 x = minus_l[4 * c];
      const float L[4] = {-x.x, -x.y, -x.z, -x.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) S[8 * c + i] *= SlopeOfP(p, S[8 * c + i], L[i / 4 * 2 + i % 2]);
    }
  }

  // Replaces dP^T by dS^T, and packs it as an operand. If dV still needed P, the slopes of a soft cap are applied here.
  // With a score_mod, dS is the cotangent of the function's argument.
  __device__ __forceinline__ void ComputeDS(const KVTile& tile, const Step& step) {
    constexpr bool kSlopes = Tuning::kRecomputesSlopes && !Tuning::kEarlyDV;
    const Score score(p, tile.batch, step.head);
    const View<true> view = ViewOf(tile, step);
    const float4* memory = reinterpret_cast<const float4*>(shared.d[at.index]) + lane % 4;
    const float4* minus_l = reinterpret_cast<const float4*>(shared.minus_l[at.index][0]) + lane % 4;
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      const float4 x = memory[4 * c], y = kSlopes ? minus_l[4 * c] : float4();
      const float D[4] = {x.x, x.y, x.z, x.w}, L[4] = {-y.x, -y.y, -y.z, -y.w};
      float cotangents[8];  // of score_mod's results
#pragma unroll
      for (int i = 8 * c; i < 8 * c + 8; ++i) {
        const int row = i / 4 % 2 * 2 + i % 2;
        dP[i] = DSOf(S[i], dP[i], D[row]);
        if (kSlopes) dP[i] *= SlopeOfP(p, S[i], L[row]);
        if (kCapturedGradients) cotangents[i % 8] = dP[i] * ZScale(p);
        if (kScoreGrad && !kScoreSlopes) dP[i] = score.ModCotangent(0.0f, dP[i], view, i / 2 % 2, i / 4 * 2 + i % 2);
        if (!kTF32 && i % 2 == 1) {
          if (Tuning::kKeepsSlopes && !Tuning::kSlopesInP) TimesSlopes(dS[i / 2], &dP[i - 1], &dP[i]);
          dS[i / 2] = Pack(dP[i - 1], dP[i]);
          if (!Tuning::kEarlyDV) P[i / 2] = PackKept(S[i - 1], S[i]);
        }
      }
      if constexpr (kCapturedGradients) {
        const View<true> opaque_view = {Opaque(view.row),
                                        Opaque(view.key)};  // Opaque: otherwise loaded values would stay in registers
        CapturedGradients{score, opaque_view, 4 * c, lane}.Add(cotangents);
      }
    }
  }

  // If both warpgroups have the same keys: sends P to the other warpgroup, after it has read the previous P.
  __device__ __forceinline__ void SendP(uint8_t* memory) {
    BarrierSync(kPRead, 2 * kWarpgroup);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      reinterpret_cast<float4*>(memory)[i * kWarpgroup + 32 * warp + lane] =
          make_float4(S[4 * i], S[4 * i + 1], S[4 * i + 2], S[4 * i + 3]);
    }
    BarrierArrive(kPFull, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void ReceiveP(const uint8_t* memory, bool last) {
    BarrierSync(kPFull, 2 * kWarpgroup);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      const float4 x = reinterpret_cast<const float4*>(memory)[i * kWarpgroup + 32 * warp + lane];
      S[4 * i] = x.x, S[4 * i + 1] = x.y, S[4 * i + 2] = x.z, S[4 * i + 3] = x.w;
    }
    if (!last) BarrierArrive(kPRead, 2 * kWarpgroup);
  }
};

}  // namespace jax_flash::hopper::backward
