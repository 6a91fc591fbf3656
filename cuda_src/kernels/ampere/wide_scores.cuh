// A warp's part of S, P, dP and dS of a tile in the backward for wide heads. Products are added slice by slice.
#pragma once

#include "ampere/parts.cuh"
#include "ampere/scores.cuh"

namespace jax_flash::ampere {

template <int kWarps, int kRows, int kKeys>
struct WideScores {
  using Part = PartOf<kWarps, kRows, kKeys>;
  static constexpr int kHeight = Part::kHeight, kWidth = Part::kWidth;

  const Part part;
  const Scores scores;
  Accumulator<kHeight, kWidth> S, dP;
  Scores::SavedScores<kHeight / 16, kWidth / 8> saved;

  // The tile begins at (row, column).
  __device__ __forceinline__ WideScores(const Params& p, int batch, int head, int row, int column)
      : scores(p, batch, head, row + part.row, column + part.column, KindOfBlock(p, batch, head, row, column)) {
    Clear(S);
    Clear(dP);
  }

  // S += Q K^T and dP += dO V^T of a slice.
  template <typename TileA, typename TileB>
  __device__ __forceinline__ void AddToS(const TileA& q, const TileB& k) {
    if (part.active) AddRowsTimesRows(S, q, part.row, k, part.column);
  }
  template <typename TileA, typename TileB>
  __device__ __forceinline__ void AddToDP(const TileA& d_o, const TileB& v) {
    if (part.active) AddRowsTimesRows(dP, d_o, part.row, v, part.column);
  }

  // `edge`: may positions mask entries of the tile?
  __device__ __forceinline__ void ApplyMasks(bool edge) {
    if (!part.active) return;
    SoftCapTanh(scores.p, S);
    if (!scores.block.Full() || edge) scores.ApplyMasks(PositionsOf(scores.p, scores.batch), S);
  }

  // P from S. It calls store(row, column, Z P / keep_scale) for each 16 x 8 entries of the tile.
  template <typename Store>
  __device__ __forceinline__ void ToP(Store store) {
    if (!part.active) return;
    float minus_l[kHeight / 16][2];
    scores.RowStatistics(scores.p.logsumexp, minus_l);
    scores.ToP<true>(S, minus_l, saved,
                     [&](int m, int c, const float (&P)[4]) { store(part.row + 16 * m, part.column + 8 * c, P); });
  }

  // Writes dS to shared memory, as an operand. kAccumulates: also adds to the gradients of captured arrays.
  template <bool kAccumulates, typename Tile>
  __device__ __forceinline__ void ToDS(Tile& tile) {
    if (!part.active) return;
    float D[kHeight / 16][2];
    scores.RowStatistics(scores.p.d, D);
    scores.ToDS<true, kAccumulates>(S, D, saved, dP);
#pragma unroll
    for (int i = 0; i < kHeight / 16 * kWidth / 8; ++i) {
      const int m = i / (kWidth / 8), c = i % (kWidth / 8);
      tile.PutOperand(part.row + 16 * m, part.column + 8 * c, dP[m][c]);
    }
  }
};

}  // namespace jax_flash::ampere
