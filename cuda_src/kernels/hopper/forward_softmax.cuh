// A consumer warpgroup of the Hopper forward between its two products: from S = Q K^T of a kv tile, in registers, to
// Z P, the left operand of P V. The order of the steps:
//   FetchMasks     starts to load the masks that are in memory, before S needs registers
//   AddBias        tiles of a bias, which TMA has loaded with K
//   CombineMasks   all masks to one bit for each entry
//   ToScores       soft cap, bias and score_mod, if they change S entry by entry; masked entries become -inf (line 11)
//   Maximum        m (line 12)
//   Exponentials   P and l (lines 12 and 13)
//   PackP          P as an operand, with dropout (line 14)
#pragma once

#include "hopper/forward_products.cuh"

namespace jax_flash::hopper::forward {

struct Probabilities : Products {
  OnlineSoftmax<2> softmax;
  PackedZ<kWarpgroupKeys> z;
  TileMask<false, kWarpgroupKeys> tile_mask;

  __device__ __forceinline__ Probabilities(const Params& p, Shared& shared) : Products(p, shared) {
    softmax.to_log2 = ToLog2(p);
  }

  // The rows and keys of this lane's entries in tile j.
  __device__ __forceinline__ View<false> ViewOf(const QTile& tile, int j) const {
    return {Row(tile), Column(j) + lane % 4 * 2};
  }
  __device__ __forceinline__ Positions PositionsHere(const QTile& tile) const {
    Positions positions = PositionsOf(p, tile.batch);
    // Rows beyond T are not stored, so they need no mask.
    if (!kProblem.q_lengths && !kProblem.ranges) positions.q_length = int64_t(1) << 32;
    return positions;
  }

  // Starts to load the masks of this lane's rows in tile j, if they are in memory. `only_element_mask`: the tile has no
  // mask but the element mask of its block.
  __device__ __forceinline__ void FetchMasks(const QTile& tile, int j, bool only_element_mask) {
    if (!kMasksInMemory) return;
    const Block<false> block(p.block_mask, kListed ? shared.listed[k.index].elements : kAllElements);
    // FetchBlock takes the row modulo kLines. If a tile is a whole block, this is the row in the tile.
    tile_mask.FetchBlock(block, Block<false>::kLines == kRows ? RowInTile() : Row(tile), Column(j));
    if (!Tuning::kCombineMasksLate) CombineMasks(tile, j, only_element_mask);
  }
  __device__ __forceinline__ void CombineMasks(const QTile& tile, int j, bool only_element_mask) {
    tile_mask.PackBits();
    if (!only_element_mask)
      tile_mask.Intersect(PositionsHere(tile), Entries(p, tile.batch, tile.head), ViewOf(tile, j));
  }

  // Replaces q_i k_j by s_ij, with the tile of the bias that was loaded with K.
  __device__ __forceinline__ void AddBias() {
    Pin(S);
    SoftCapTanh(p, S);
    const uint8_t* const rows = shared.bias[k.index] + (64 * row_group + 16 * warp) * kBoxBytes;
#pragma unroll
    for (int i = 0; i < kWarpgroupKeys / 2; ++i) S[i] *= CapOrScale(p);
#pragma unroll
    for (int c = 0; c < kWarpgroupKeys; c += 16) {
      if (Tuning::kBiasInParts && c % 32 == 0 && OpaqueFalse()) return;
      AddBiasTile<false>(rows, key_group * kWarpgroupKeys + c, S + c / 2);
    }
    FenceProxyAsync();  // before TMA overwrites the tile of the bias
    // Every lane reads the tile, but one lane releases it. ldmatrix, which reads a bias of 16 bits, has synchronized
    // the warp.
    if (kBiasDType == DType::kF32) SyncWarp();
  }

  // Replaces q_i k_j by s_ij where AddBias has not done so, and sets masked entries to -inf. Without a bias or
  // score_mod, S still lacks a factor that the exponent applies (ScoreScale): the scale, or the cap after SoftCapTanh.
  template <bool kMasked>
  __device__ __forceinline__ void ToScores(const QTile& tile, int j) {
    const Score score(p, tile.batch, tile.head);
    const View<false> view = ViewOf(tile, j);
    if (!kBiasTiles) SoftCapTanh(p, S);
    // A score_mod that indexes captured arrays by position must clamp these indices, unless all entries of the tile are
    // within T and S. Most tiles are, so there are two versions of the code.
    if (program::kClampsIndices && tile.row + kRows <= p.q_len && Column(j) + kWarpgroupKeys <= p.kv_len &&
        (!kProblem.query_offset || QueriesWithinKeys(p, tile.batch, tile.row, kRows))) {
      FormEntries<true>(score, view);
    } else {
      FormEntries<false>(score, view);
    }
    if (!kMasked) return;
    if constexpr (kMasksInMemory) {
      tile_mask.Apply(S);
    } else {
      MaskOutside(PositionsHere(tile), view, S);
    }
  }

  // Adds the bias, unless AddBias has, and applies score_mod. kInBounds: all entries are known to be within T and S,
  // and the queries' positions within the keys.
  template <bool kInBounds>
  __device__ __forceinline__ void FormEntries(const Score& score, const View<false>& view) {
#pragma unroll
    for (int i = 0; kScoresByEntry && i < kWarpgroupKeys / 2; ++i) {
      const int h = i / 2 % 2, x = i / 4 * 2 + i % 2;
      if (!kBiasTiles) S[i] = score.BeforeMod(S[i], view.Row(h, x), view.Key(h, x));
      S[i] = score.Mod<kInBounds>(S[i], view, h, x);
    }
    if (program::kClampsIndices) PinDistinct<kInBounds>(S);
  }

  // Updates the row maxima m. O must be multiplied by alpha. Exponents subtract `shift`.
  __device__ __forceinline__ void Maximum(float (&alpha)[2], float (&shift)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      alpha[h] = 1.0f;
      if (softmax.Maximum(S, h)) alpha[h] = softmax.Rescale(h);
      shift[h] = softmax.Shift(h);
    }
  }

  // Replaces S by P, and adds its row sums to l.
  __device__ __forceinline__ void Exponentials(const float (&shift)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) softmax.Exponentials(S, h, shift[h]);
  }

  // Generates the dropout mask Z of tile j.
  __device__ __forceinline__ void GenerateZ(const QTile& tile, int j) { z.Generate(p, Row(tile), Column(j)); }

  // Packs Z P as the left operand of P V.
  __device__ __forceinline__ void PackP() {
#pragma unroll
    for (int i = 0; i < kWarpgroupKeys / kStep * 4; ++i)  // TF32: keys are in the order of V^T (hopper/transpose.cuh)
      P[i] = kTF32 ? RoundTF32(__float_as_uint(S[i / 4 * 4 + i % 2 * 2 + i / 2 % 2])) : Pack(S[2 * i], S[2 * i + 1]);
    z.Apply(P);
  }
};

}  // namespace jax_flash::hopper::forward
