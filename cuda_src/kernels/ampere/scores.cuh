// S, P and dS in a warp's accumulators of S and dP.
//
// Accumulators are float [m][c][2 h + e], as in ampere/fragments.cuh: entry (16 m + 8 h + lane / 4, 8 c + 2 (lane % 4)
// + e) of the part of S that begins at (row, column).
#pragma once

#include "ampere/fragments.cuh"
#include "ampere/matrix.cuh"
#include "semantics/dropout.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::ampere {

// A warp's part of a tile of S, of one batch entry and query head.
struct Scores {
  const Params& p;
  const Entries entries;
  const Score score;
  const Block<false> block;
  int batch, head, row, column;

  // `kind` is the kind of the block that contains this part.
  __device__ __forceinline__ Scores(const Params& p, int batch, int head, int row, int column, int kind)
      : p(p),
        entries(p, batch, head),
        score(p, batch, head),
        block(p.block_mask, batch, kind),
        batch(batch),
        head(head),
        row(row),
        column(column) {}

  __device__ __forceinline__ int Row(int m, int h) const { return row + 16 * m + 8 * h + threadIdx.x % 32 / 4; }
  __device__ __forceinline__ int Query(int m, int h) const { return Row(m, h) / kPacked; }
  __device__ __forceinline__ int Member(int m, int h) const {
    return Row(m, h) % kPacked;
  }  // the row belongs to head + Member
  __device__ __forceinline__ int Column(int c, int e) const { return column + 8 * c + threadIdx.x % 4 * 2 + e; }

  // Sets masked entries to -inf.
  template <int kCount, int kChunks>
  __device__ __forceinline__ void ApplyMasks(const Positions& positions, float (&S)[kCount][kChunks][4]) const {
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
      const View<false> view = {Row(m, 0), Column(0, 0)};
      if constexpr (kMasksInMemory) {
        TileMask<false, 8 * kChunks> tile_mask;
        tile_mask.FetchBlock(block, view.row, column);
        tile_mask.PackBits();
        tile_mask.Intersect(positions, entries, view);
        tile_mask.Apply(S[m]);
      } else {
        MaskOutside(positions, view, S[m]);
      }
    }
  }

  // Replaces x by the score where scores are formed in full. Masked entries stay masked.
  template <int kCount, int kChunks>
  __device__ __forceinline__ void ToScores(float (&S)[kCount][kChunks][4]) const {
#pragma unroll
    for (int i = 0; i < kCount * kChunks * 4; ++i) {
      const int m = i / 4 / kChunks, c = i / 4 % kChunks, r = i % 4;
      float& x = S[m][c][r];
      if (x == -Infinity()) continue;
      x *= CapOrScale(p);
      if (kBias) x = WithBias(x, score.Bias(Query(m, r / 2), Column(c, r % 2), Member(m, r / 2)));
      x = score.Mod(x, Query(m, r / 2), Column(c, r % 2), Member(m, r / 2));
    }
  }

  // Replaces P by Z P, without the factor of the kept entries, and `others` likewise.
  template <int kCount, int kChunks, typename... Others>
  __device__ __forceinline__ void ApplyZ(float (&P)[kCount][kChunks][4], Others&... others) const {
    if (!kDropout) return;
#pragma unroll
    for (int i = 0; i < kCount * kChunks / 2; ++i) {
      const int m = i / (kChunks / 2), pair = i % (kChunks / 2);
      const Philox4 random = Random(m, pair);
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        const int half = x / 4, h = x / 2 % 2, e = x % 2, c = 2 * pair + half;
        if (Dropped(p, random.x[2 * h + half], e)) P[m][c][2 * h + e] = 0.0f, ((others[m][c][2 * h + e] = 0.0f), ...);
      }
    }
  }

  // Backward: loads the rows' statistics that ampere/backward_prepare.cuh computed.
  template <int kCount>
  __device__ __forceinline__ void RowStatistics(const float* statistics, float (&x)[kCount][2]) const {
    const int64_t from = (int64_t(batch) * p.q_heads + head) * PaddedRows(p);
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) x[i / 2][i % 2] = statistics[from + Row(i / 2, i % 2)];
  }

  // With a score_grad, ToDS also needs x, or the result of SoftCapTanh.
  template <int kCount, int kChunks>
  struct SavedScores {
    float x[kScoreGrad ? kCount : 1][kChunks][4];
  };

  // P = exp(s - L) from x, or the result of SoftCapTanh. It calls store(m, c, Z P / keep_scale) for each 16 x 8
  // entries. S becomes P, negative where dropped. With kSlope and no score_grad, S becomes P times the slope of the
  // soft cap, dc / d(scale x).
  template <bool kSlope, int kCount, int kChunks, typename Store>
  __device__ __forceinline__ void ToP(float (&S)[kCount][kChunks][4], const float (&minus_l)[kCount][2],
                                      SavedScores<kCount, kChunks>& saved, Store store) const {
    const float to_log2 = ToLog2(p);
    float maximum[kCount][2];
    RowMaxima(maximum);
#pragma unroll
    for (int i = 0; i < kCount * kChunks / 2; ++i) {
      const int m = i / (kChunks / 2), pair = i % (kChunks / 2);
      const Philox4 random = Random(m, pair);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = 2 * pair + half;
        float kept[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int h = r / 2, e = r % 2;
          float& x = S[m][c][r];
          float slope = 1.0f;
          if constexpr (kFormsScores) {
            float s = -Infinity();
            if (x != -Infinity()) {
              s = kWholeScores ? x * CapOrScale(p) : x;
              if (kSlope && !kScoreGrad) slope = SlopeOf(x);
              if (kScoreGrad) saved.x[m][c][r] = x;
              if (kBias) s = WithBias(s, score.Bias(Row(m, h), Column(c, e)));
              s = score.Mod(s, Row(m, h), Column(c, e));
            }
            x = Exp2(fmaf(kSeparateMaximum ? s - maximum[m][h] : s, to_log2, minus_l[m][h]));
          } else {
            x = Exp2(fmaf(x, to_log2, minus_l[m][h]));
          }
          kept[r] = x;
          if (kSlope) x *= slope;
          if (Dropped(p, random.x[2 * h + half], e)) kept[r] = 0.0f, x = -x;
        }
        store(m, c, kept);
      }
    }
  }

  // dS = P (Z dP - D) from the S that ToP left; with kSlope, dX. With a score_grad, dS is the cotangent of score_mod's
  // argument. kAccumulates: also adds to the gradients of captured arrays.
  template <bool kSlope, bool kAccumulates, int kCount, int kChunks>
  __device__ __forceinline__ void ToDS(const float (&S)[kCount][kChunks][4], const float (&D)[kCount][2],
                                       const SavedScores<kCount, kChunks>& saved,
                                       float (&dP)[kCount][kChunks][4]) const {
#pragma unroll
    for (int i = 0; i < kCount * kChunks * 4; ++i) {
      const int m = i / 4 / kChunks, c = i / 4 % kChunks, r = i % 4;
      float& x = dP[m][c][r];
      x = DSOf(S[m][c][r], x * ZScale(p), D[m][r / 2]);
      if constexpr (kScoreGrad) {
        const int i = Row(m, r / 2), j = Column(c, r % 2);
        x = score.ModCotangent<kAccumulates>(score.BeforeMod(saved.x[m][c][r], i, j), x, i, j);
        if (kSlope && x != 0.0f) x *= SlopeOf(saved.x[m][c][r]);  // masked entries have no slope
      }
    }
  }

 private:
  // The row's maximum m if kSeparateMaximum, which is subtracted from scores in addition to L; otherwise 0.
  template <int kCount>
  __device__ __forceinline__ void RowMaxima(float (&x)[kCount][2]) const {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      const int row = Row(i / 2, i % 2);
      const float m =
          kSeparateMaximum && row < p.q_len ? p.m[(int64_t(batch) * p.q_heads + head) * p.q_len + row] : 0.0f;
      x[i / 2][i % 2] = m == -Infinity() ? 0.0f : m;
    }
  }

  // The random words for this lane's entries in 16 rows and 16 columns.
  __device__ __forceinline__ Philox4 Random(int m, int pair) const {
    if constexpr (!kDropout) return {};
    const int columns = column / 16 + pair;
    if constexpr (kPacked == 1) return Seed(p, batch, head).Words(columns, (row / 16 + m) * 8 + threadIdx.x % 32 / 4);
    Philox4 bits;  // the two rows may belong to different queries and heads
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = Query(m, h);
      const Philox4 x = Seed(p, batch, head + Member(m, h)).Words(columns, RowCounter(i));
#pragma unroll
      for (int half = 0; half < 2; ++half) bits.x[2 * h + half] = i / 8 % 2 == 0 ? x.x[half] : x.x[2 + half];
    }
    return bits;
  }
};

}  // namespace jax_flash::ampere
