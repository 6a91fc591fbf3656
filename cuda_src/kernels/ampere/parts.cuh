// Divides a matrix product among the warps of a CTA.
#pragma once

#include "ampere/fragments.cuh"

namespace jax_flash::ampere {

struct Division {
  int rows, columns;  // of warps
};

// Divides `height` rows and `width` columns, rounded up to 16, into parts of whole 16 x 16 tiles. It uses the largest
// number of warps that can have equal parts. From the possible divisions it picks the one with the squarest parts,
// which read the least. If the width is not divisible, the last parts are narrower.
__host__ __device__ constexpr Division Divide(int warps, int height, int width) {
  Division best = {1, 1};
  const auto part_width = [&](int columns) { return RoundUp(RoundUp(width, 16), 16 * columns) / columns; };
  for (int rows = 1; rows <= warps && height % (16 * rows) == 0; rows *= 2) {
    for (int columns = 1; rows * columns <= warps && 16 * columns < width + 16; columns *= 2) {
      const int area = height / rows * part_width(columns), edges = height / rows + part_width(columns);
      const int best_area = height / best.rows * part_width(best.columns);
      const int best_edges = height / best.rows + part_width(best.columns);
      if (area < best_area || (area == best_area && edges < best_edges)) best = {rows, columns};
    }
  }
  return best;
}

// This warp's part of a product of kRows x kColumns.
template <int kWarps, int kRows, int kColumns>
struct PartOf {
  static constexpr Division kDivision = Divide(kWarps, kRows, kColumns);
  static constexpr int kHeight = kRows / kDivision.rows;
  static constexpr int kWidth = RoundUp(RoundUp(kColumns, 16), 16 * kDivision.columns) / kDivision.columns;
  static constexpr bool kWhole = kWidth * kDivision.columns == kColumns;  // no part extends past the last column

  const int row, column;
  const bool active;

  __device__ __forceinline__ PartOf()
      : row(int(threadIdx.x / 32) / kDivision.columns * kHeight),
        column(int(threadIdx.x / 32) % kDivision.columns * kWidth),
        active((kDivision.rows * kDivision.columns == kWarps ||
                int(threadIdx.x / 32) < kDivision.rows * kDivision.columns) &&
               (kWidth * (kDivision.columns - 1) < kColumns || column < kColumns)) {}
};

}  // namespace jax_flash::ampere
