// A tile in shared memory: its layout by TMA, and the addresses for wgmma, ldmatrix and stmatrix.
//
// TMA writes a tile as a sequence of boxes. A box has all rows, and 128 bytes of columns. Within a box, the 16-byte
// chunks of a row are swizzled: chunk c of row r is stored at position c ^ r % 8. A matrix descriptor (ptx/wgmma.cuh)
// describes this layout to wgmma, which needs the address of each of its steps. A step takes 32 bytes of the dimension
// that is summed over, which PTX calls k:
//   K-major   columns are summed over, as in Q K^T. A box has four steps, each 32 bytes further along the rows.
//   MN-major  rows are summed over, as in P V. Each step is 16 rows further down. Only 16-bit elements allow it.
#pragma once

#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace jax_flash::hopper {

template <int kRows>
struct KMajorOperand {
  uint64_t descriptor;  // of the first step

  // Step d, from box `box` on.
  __device__ __forceinline__ uint64_t KStep(int d, int box = 0) const {
    return Advance(descriptor, (box + d / 4) * kRows * kBoxBytes + d % 4 * 32);
  }
};

template <int kRows>
struct MNMajorOperand {
  uint64_t descriptor;  // of the first step

  // Step i, in the boxes from `box` on.
  __device__ __forceinline__ uint64_t KStep(int i, int box = 0) const {
    return Advance(descriptor, box * kRows * kBoxBytes + i * 16 * kBoxBytes);
  }
};

// A view of memory as a tile. Arrays of tiles would tell the compiler their alignment, and change its code.
template <int kRows, int kBoxes>
struct SharedTile {
  static constexpr int kBox = kRows * kBoxBytes, kBytes = kBoxes * kBox;
  static_assert(kBox % 1024 == 0);  // the swizzle depends on address bits

  uint8_t* memory;

  __device__ __forceinline__ uint8_t* Box(int b) const { return memory + b * kBox; }

  // The rows from `row` on, a multiple of 8, as an operand whose columns are summed over.
  __device__ __forceinline__ KMajorOperand<kRows> KMajor(int row = 0) const {
    return {Descriptor(memory + row * kBoxBytes, 0)};
  }
  // The rows from `row` on, and the columns from `column` on, as an operand whose rows are summed over.
  __device__ __forceinline__ MNMajorOperand<kRows> MNMajor(int row = 0, int column = 0) const {
    return {Descriptor(memory + row * kBoxBytes + column / kBoxColumns * kBox + column % kBoxColumns * kElementBytes,
                       kBox)};
  }
  // Only box b, as such an operand.
  __device__ __forceinline__ MNMajorOperand<kRows> MNMajorBox(int b) const { return {Descriptor(Box(b), 0)}; }

  // In the first 16 rows: the address of a lane's row for ldmatrix or stmatrix, at the c-th 32 bytes.
  __device__ __forceinline__ uint32_t Matrices(int lane, int c) const {
    return MatricesOf(memory + c / 4 * kBox, lane, c % 4);
  }

  // Starts to load all boxes. `full` already expects their bytes.
  __device__ __forceinline__ void Load(const TensorMap* map, uint64_t* full, int row, int head, int batch) const {
    for (int b = 0; b < kBoxes; ++b) TmaLoad(Box(b), map, full, b * kBoxColumns, row, head, batch);
  }
};

}  // namespace jax_flash::hopper
