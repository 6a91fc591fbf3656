// Where the Hopper backward has what belongs to the rows of Q: L, D, and dQ in f32. They are in scratch memory, in
// blocks of kRowBlock rows.
#pragma once

#include "ptx/compiler.cuh"
#include "semantics/score.cuh"

namespace jax_flash::hopper {

// Is this done by the three warps that have nothing to do beside the one that loads (hopper/backward_alongside.cuh)?
constexpr bool kAlongside = kTiling.alongside;

// A head has a multiple of this many rows in scratch, which are whole tiles of the backward. (With a bias these have 64
// rows. The pass for dbias has larger tiles, and finds the rows where they are.)
constexpr int kHeadRows = kBias ? kRowBlock : kTiling.rows;

// How many blocks a head has, and which block in scratch is its first. (Computed again and again, by warps that have
// few registers.)
__device__ __forceinline__ int BlocksOfHead(const Params& p) {
  return (Fresh(p.q_len) + kHeadRows - 1) / kHeadRows * (kHeadRows / kRowBlock);
}
__device__ __forceinline__ int FirstRowBlock(const Params& p, uint32_t head) {
  return (kAlongside ? head % Fresh(p.scratch_heads) : head) * BlocksOfHead(p);
}

// Where row r of L and D is stored. Rows are permuted within each 16, so that what a lane needs for a 16 x 16 tile of
// S^T is one float4.
__device__ __forceinline__ int PlaceOfRow(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

}  // namespace jax_flash::hopper
