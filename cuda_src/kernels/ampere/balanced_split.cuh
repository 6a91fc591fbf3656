// Load balancing of a split-KV forward if batch entries have different lengths.
//
// The kv tiles that each q tile of one head sees are concatenated over q tiles and batch entries. This sequence is cut
// into at most p.parts equal stretches. A CTA computes one stretch for one key/value head, and visits each q tile in
// it. So all CTAs have equal work for any lengths.
//
// A part is the intersection of a stretch with a q tile's keys. Its number is the stretch's number plus the q tile's
// number. From one part to the next, one of the two numbers increases, and neither decreases. So numbers of parts are
// unique, and the numbers of one q tile are consecutive. A q tile without keys has no part.
#pragma once

#include "ampere/kv_loop.cuh"

namespace jax_flash::ampere::forward {

// The q tiles that a CTA visits: one, unless work is balanced.
template <bool kMany>
class QTilesOfCTA {
 public:
  __device__ __forceinline__ explicit QTilesOfCTA(const Params& p) : p_(p) {}

  __device__ __forceinline__ bool Exists() const { return true; }
  __device__ __forceinline__ decltype(auto) Tile() const { return TileHere(p_); }
  __device__ __forceinline__ bool Next() const { return false; }

 private:
  const Params& p_;
};

// Balanced work: the q tiles of this CTA's stretch.
template <>
class QTilesOfCTA<true> {
 public:
  // Every warp scans all q tiles, 32 at a time. The first CTAs of the grid write the parts of each q tile.
  __device__ __forceinline__ explicit QTilesOfCTA(const Params& p) : p_(p), number_(blockIdx.x / p.kv_heads) {
    const int tiles = p.batch * TilesOfHead(p), lane = threadIdx.x % 32;
    const auto visible = [&](int first) { return first + lane < tiles ? KVTilesOf(first + lane) : 0; };
    int all = 0;
#pragma unroll 4
    for (int first = 0; first < tiles; first += 32) all += visible(first);
    all = LaneSum<32>(all);
    const int stretches = min(p.parts, max(all / kMinKVTiles, 1));
    if (number_ >= stretches) return;
    const auto begin_of = [&](int number) { return int(int64_t(number) * all / stretches); };
    const auto stretch_at = [&](int x) { return int(((x + int64_t(1)) * stretches - 1) / all); };
    const int begin = begin_of(number_);
    left_ = begin_of(number_ + 1) - begin;

    const bool writes = blockIdx.x == 0 && threadIdx.x < 32;
    int before = 0;
    for (int first = 0; first < tiles && (before <= begin || writes); first += 32) {
      const int size = visible(first), end = before + LanePrefixSum(size);
      if (writes && first + lane < tiles) {
        const int part = size > 0 ? stretch_at(end - size) : 0, last = size > 0 ? stretch_at(end - 1) : -1;
        p.tile_parts[first + lane] = {first + lane + part, last - part + 1};
      }
      const int past =
          __popc(__ballot_sync(0xFFFFFFFFu, end <= begin));  // q tiles, of these 32, that end before this stretch
      const int begins = __shfl_sync(0xFFFFFFFFu, end - size, past % 32);
      if (before <= begin && past < 32) tile_ = first + past, skipped_ = begin - begins;
      before = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    Find();
  }

  __device__ __forceinline__ bool Exists() const { return left_ > 0; }
  __device__ __forceinline__ decltype(auto) Tile() const {
    return TileHere(p_, BalancedPart{tile_, skipped_, size_, tile_ + number_});
  }
  // Moves to the next q tile. Returns whether there is one.
  __device__ __forceinline__ bool Next() {
    __syncthreads();  // until all warps are done with the current tile
    left_ -= size_;
    ++tile_, skipped_ = 0;
    Find();
    return Exists();
  }

 private:
  const Params& p_;
  int number_;
  int left_ = 0;                // kv tiles left in the stretch
  int tile_ = 0, skipped_ = 0;  // this q tile, and the number of its kv tiles that previous stretches have
  int size_ = 0;                // the number of its kv tiles in this stretch

  // The number of kv tiles that a q tile sees.
  __device__ __forceinline__ int KVTilesOf(int tile) const {
    const int tiles = TilesOfHead(p_);
    const Visible keys = KeysOfTile(p_, tile / tiles, tile % tiles * kRows);
    return keys.any_lo < keys.any_hi ? (keys.any_hi + kKeys - 1) / kKeys - keys.any_lo / kKeys : 0;
  }

  // Advances to a q tile that sees keys.
  __device__ __forceinline__ void Find() {
    for (; left_ > 0; ++tile_) {
      size_ = min(KVTilesOf(tile_) - skipped_, left_);
      if (size_ > 0) return;
    }
  }
};

}  // namespace jax_flash::ampere::forward
