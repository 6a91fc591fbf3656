// How a forward over parts of the keys balances its work where batch entries see differently many keys.
//
// The tiles of keys that the tiles of Q of one head see are laid end to end, tile of Q by tile of Q, batch entry by
// batch entry, and cut into equal stretches, as many as p.parts at most. A CTA has one stretch, of one head of the
// keys, and stops at each tile of Q that the stretch is about. So all CTAs have the same to do, whatever lengths there
// are.
//
// What a stretch has of the keys of a tile of Q is a part of them. Its number is the sum of the numbers of both: from
// one part to the next the stretch's goes up, or the tile's, or both, and neither ever falls. So no two parts have the
// same number, and those of a tile of Q are side by side. A tile that sees no key has none.
#pragma once

#include "ampere/walk.cuh"

namespace jax_flash::ampere::forward {

// The tiles of Q at which a CTA stops: one, unless work is balanced.
template <bool kMany>
class Stops {
 public:
  __device__ __forceinline__ explicit Stops(const Params& p) : p_(p) {}

  __device__ __forceinline__ bool Exists() const { return true; }
  __device__ __forceinline__ decltype(auto) Tile() const { return TileHere(p_); }
  __device__ __forceinline__ bool Next() const { return false; }

 private:
  const Params& p_;
};

// Where work is balanced: the tiles of Q that a CTA's stretch is about.
template <>
class Stops<true> {
 public:
  // Every warp looks at all tiles of Q, 32 at a time. The first of the grid writes down which parts a tile has.
  __device__ __forceinline__ explicit Stops(const Params& p) : p_(p), number_(blockIdx.x / p.kv_heads) {
    const int tiles = p.batch * TilesOfHead(p), lane = threadIdx.x % 32;
    const auto seen = [&](int first) { return first + lane < tiles ? KeyTilesOf(first + lane) : 0; };
    int all = 0;
#pragma unroll 4
    for (int first = 0; first < tiles; first += 32) all += seen(first);
    all = LaneSum<32>(all);
    const int stretches = min(p.parts, max(all / kLeastKeyTiles, 1));
    if (number_ >= stretches) return;
    const auto begin_of = [&](int number) { return int(int64_t(number) * all / stretches); };
    const auto stretch_at = [&](int x) { return int(((x + int64_t(1)) * stretches - 1) / all); };
    const int begin = begin_of(number_);
    left_ = begin_of(number_ + 1) - begin;

    const bool writes = blockIdx.x == 0 && threadIdx.x < 32;
    int before = 0;
    for (int first = 0; first < tiles && (before <= begin || writes); first += 32) {
      const int size = seen(first), end = before + LanePrefixSum(size);
      if (writes && first + lane < tiles) {
        const int part = size > 0 ? stretch_at(end - size) : 0, last = size > 0 ? stretch_at(end - 1) : -1;
        p.tile_parts[first + lane] = {first + lane + part, last - part + 1};
      }
      const int past = __popc(__ballot_sync(0xFFFFFFFFu, end <= begin));  // tiles of these 32
      const int begins = __shfl_sync(0xFFFFFFFFu, end - size, past % 32);
      if (before <= begin && past < 32) tile_ = first + past, skipped_ = begin - begins;
      before = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    Find();
  }

  __device__ __forceinline__ bool Exists() const { return left_ > 0; }
  __device__ __forceinline__ decltype(auto) Tile() const {
    return TileHere(p_, Stop{tile_, skipped_, size_, tile_ + number_});
  }
  // Goes on to the next tile of Q. Returns whether there is one.
  __device__ __forceinline__ bool Next() {
    __syncthreads();  // until nobody needs the tile of this one
    left_ -= size_;
    ++tile_, skipped_ = 0;
    Find();
    return Exists();
  }

 private:
  const Params& p_;
  int number_;
  int left_ = 0;                // tiles of keys of the stretch that are still to come
  int tile_ = 0, skipped_ = 0;  // this tile of Q, and how many of its tiles of keys the CTAs before have
  int size_ = 0;                // how many of its tiles of keys this CTA has

  // How many tiles of keys a tile of Q sees.
  __device__ __forceinline__ int KeyTilesOf(int tile) const {
    const int tiles = TilesOfHead(p_);
    const Visible keys = KeysOfTile(p_, tile / tiles, tile % tiles * kRows);
    return keys.any_lo < keys.any_hi ? (keys.any_hi + kKeys - 1) / kKeys - keys.any_lo / kKeys : 0;
  }

  // Goes on to a tile of Q that sees keys.
  __device__ __forceinline__ void Find() {
    for (; left_ > 0; ++tile_) {
      size_ = min(KeyTilesOf(tile_) - skipped_, left_);
      if (size_ > 0) return;
    }
  }
};

}  // namespace jax_flash::ampere::forward
