// Where the Hopper backward has what it needs of the rows of Q beside themselves: L and D, and dQ in f32, in scratch by
// blocks of kRowBlock rows.
#pragma once

#include "ptx/compiler.cuh"
#include "semantics/score.cuh"

namespace jax_flash {

// Three warps beside the one that loads would have nothing to do: hopper/backward_alongside.cuh.
constexpr bool kAlongside = kTiling.alongside;

// A head has a multiple of so many rows there, whole tiles of the backward. (With a bias it has tiles of 64; those of
// dbias, which are larger, find them where they are.)
constexpr int kHeadRows = kBias ? kRowBlock : kTiling.rows;

// How many blocks a head has, and which is its first of those in scratch. (Asked again and again by warps that have few
// registers.)
__device__ __forceinline__ int BlocksOfHead(const Params& p) {
  return (Fresh(p.q_len) + kHeadRows - 1) / kHeadRows * (kHeadRows / kRowBlock);
}
__device__ __forceinline__ int FirstRowBlock(const Params& p, uint32_t head) {
  return (kAlongside ? head % Fresh(p.scratch_heads) : head) * BlocksOfHead(p);
}

// L and D are stored in whole tiles, 16 rows lane by lane: one float4 is what a lane needs of a 16 x 16 tile of S^T.
__device__ __forceinline__ int Place(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

}  // namespace jax_flash
