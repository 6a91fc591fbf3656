// What a consumer warpgroup of the Hopper forward does with its S between the products: masks, scores, softmax,
// dropout.
#pragma once

#include "hopper/forward_products.cuh"

namespace jax_flash {

// Lines 11 to 14 of Algorithm 2: from S to Z P.
struct Probabilities : Products {
  OnlineSoftmax<2> softmax;
  PackedZ<kCols> z;
  uint32_t seen[2][kSeenWords];  // of a tile, from the lane's first column on

  __device__ __forceinline__ Probabilities(const Params& p, ForwardShared& shared) : Products(p, shared) {
    softmax.to_log2 = ToLog2(p);
  }

  // The two rows' keys, from the lane's first column of tile j on: begin <= offset < end.
  __device__ __forceinline__ void RowEnds(const QTile& tile, int j, int (&begin)[2], int (&end)[2]) const {
    Positions positions = PositionsOf(p, tile.batch);
    if (!kProblem.q_lengths) positions.q_length = int64_t(1) << 32;  // rows beyond T are not stored
    const int column = Column(j) + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyRange keys = RowKeys(positions, Row(tile) + 8 * h);
      begin[h] = int(min(keys.lo, int64_t(p.kv_len))) - column, end[h] = int(keys.hi) - column;
    }
  }

  // What has to be looked up in memory: which columns of tile j this lane's rows see.
  template <bool kMasked>
  __device__ __forceinline__ void Look(const QTile& tile, int j) {
    if (!kMasked || !kLookedUp) return;
    const Block block(p, tile.batch, kListed ? shared.listed[k.index].kind : kEverything);
    const Entries entries(p, tile.batch, tile.head);
    const int row = Row(tile), column = Column(j) + lane % 4 * 2;
    const int row_in_block = RowInBlock<kRows>(tile.row) + RowInTile();
    const int column_in_block = ColumnInBlock<kKeys>(j * kKeys) + key_group * kCols;
    int begin[2], end[2];
    RowEnds(tile, j, begin, end);
#pragma unroll
    for (int w = 0; w < kSeenWords; ++w) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        seen[h][w] = SeenBits(begin[h], end[h], 32 * w);
        if (kListed) seen[h][w] &= block.Word<kCols>(row_in_block + 8 * h, column_in_block, 32 * w) >> lane % 4 * 2;
      }
#pragma unroll
      for (int x = 0; kEntryMasks && x < 16; ++x) {
        const int h = x / 2 % 2, bit = x / 4 * 8 + x % 2, offset = 32 * w + bit;
        if (offset < kCols && entries.Hidden(min(row + 8 * h, p.q_len - 1), min(column + offset, p.kv_len - 1)))
          seen[h][w] &= ~(1u << bit);
      }
    }
  }

  // Whether the warp's rows see all keys of the tile that was looked up.
  __device__ __forceinline__ bool AllSeen() const {
    if (!Tuning::kVote) return false;
    uint32_t all = 0xFFFFFFFF;
#pragma unroll
    for (int w = 0; w < kSeenWords; ++w) all &= seen[0][w] & seen[1][w];
    return __all_sync(0xFFFFFFFFu, (all & 0x03030303u) == 0x03030303u);  // a lane has two columns of each 8
  }

  // From q_i k_j to s_ij, -inf where row i does not see key j. Without kFormsScores S stays without its scale.
  template <bool kMasked>
  __device__ __forceinline__ void ToScores(const QTile& tile, int j) {
    if (!kMasked && !kFormsScores) return;
    const int row = Row(tile), column = Column(j) + lane % 4 * 2;
    const Score score(p, tile.batch, tile.head);
    const View<false> view = {row, column};
    int begin[2], end[2];
    RowEnds(tile, j, begin, end);
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) {
      const int h = i / 2 % 2, x = i / 4 * 2 + i % 2, offset = OffsetOf(x);
      S[i] = score.Of(S[i], view.Row(h, x), view.Key(h, x));
      if (!kMasked) continue;
      if (kLookedUp ? (seen[h][offset / 32] >> offset % 32 & 1) == 0 : Outside(begin[h], end[h], offset)) {
        S[i] = -Infinity();
      }
    }
  }

  // The row maxima. O will have to be multiplied by alpha; `shift` is what the exponents are taken against.
  __device__ __forceinline__ void Maximum(float (&alpha)[2], float (&shift)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      alpha[h] = 1.0f;
      if (softmax.Maximum(S, h)) alpha[h] = softmax.Rescale(h);
      shift[h] = softmax.Shift(h);
    }
  }

  // S becomes P, l its row sums.
  __device__ __forceinline__ void Exponentials(const float (&shift)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) softmax.Exponentials(S, h, shift[h]);
  }

  // Which entries of tile j dropout keeps.
  __device__ __forceinline__ void Draw(const QTile& tile, int j) { z.Draw(p, Row(tile), Column(j)); }

  // Z P as the left operand of O.
  __device__ __forceinline__ void PackP() {
#pragma unroll
    for (int i = 0; i < kCols / kStep * 4; ++i)
      P[i] = kTF32 ? RoundTF32(__float_as_uint(S[i / 4 * 4 + i % 2 * 2 + i / 2 % 2])) : Pack(S[2 * i], S[2 * i + 1]);
    z.Apply(P);
  }
};

}  // namespace jax_flash
