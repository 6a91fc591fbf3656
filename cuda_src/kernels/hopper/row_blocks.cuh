// The layout of the Hopper backward's scratch for the rows of Q: L, D, and dQ in f32, in blocks of kRowBlock rows.
#pragma once

#include "ptx/compiler.cuh"
#include "semantics/score.cuh"

namespace jax_flash::hopper {

// Do the three idle warps of the producer warpgroup prepare and finish rows (hopper/backward_fused_rows.cuh)?
constexpr bool kFusedRows = kTiling.fused_rows;

// The rows of a head in scratch are padded to a multiple of this, to whole tiles of the backward. With a bias, tiles
// have 64 rows. The dbias kernel has larger tiles but uses the same layout.
constexpr int kHeadRows = kBias ? kRowBlock : kTiling.rows;

// The number of blocks of a head, and the index of its first block in scratch. They are recomputed at each use, to save
// registers.
__device__ __forceinline__ int BlocksOfHead(const Params& p) {
  return (Opaque(p.q_len) + kHeadRows - 1) / kHeadRows * (kHeadRows / kRowBlock);
}
__device__ __forceinline__ int FirstRowBlock(const Params& p, uint32_t head) {
  return (kFusedRows ? head % Opaque(p.scratch_heads) : head) * BlocksOfHead(p);
}

// The index of row r of L and D. Rows are permuted within each 16. Then a lane's values for a 16 x 16 tile of S^T are
// one float4.
__device__ __forceinline__ int PermutedRow(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

}  // namespace jax_flash::hopper
