// With a block mask, a thread of the producer warpgroup reads the lists of blocks ahead of the thread that loads tiles,
// and passes it the tiles through a ring in shared memory. Finding a tile takes four dependent reads: the counter, the
// list, its members, and their kinds. Together they take as long as the computation of a short list.
#pragma once

#include "hopper/forward_tiles.cuh"
#include "ptx/mbarrier.cuh"

namespace jax_flash::hopper::forward {

// The thread that reads the lists.
struct ListPrefetcher {
  const Params& p;
  Shared& shared;
  Ring<kPrefetchDepth> at;
  // Each tile of O takes at least one entry of the ring, an empty one if it sees no keys. So at most kPrefetchDepth
  // tiles of O are ahead of the tile that is being loaded, and they need no barriers of their own.
  Ring<kPrefetchDepth + 1> tiles;

  __device__ __forceinline__ void Run() {
    ListReader reader{p};
    while (reader.NextTile()) {
      ListedTile keys = reader.NextKeys();
      Wait();
      Publish(reader.tile);
      Publish(keys);
      while (keys.Exists() && !keys.Last()) {
        keys = reader.NextKeys();
        Wait();
        Publish(keys);
      }
    }
    Wait();
    Publish(QTile{-1});
    Publish(ListedTile{});
  }

 private:
  __device__ __forceinline__ void Wait() { MbarrierWait(&shared.prefetched_empty[at.index], at.parity ^ 1); }
  __device__ __forceinline__ void Publish(const QTile& next) {
    shared.prefetched_tile[tiles.index] = next;
    tiles.Next();
  }
  __device__ __forceinline__ void Publish(ListedTile keys) {
    shared.prefetched[at.index] = keys;
    MbarrierArrive(&shared.prefetched_full[at.index]);
    at.Next();
  }
};

// Visits the tiles that a ListPrefetcher has read, with the interface of ListReader.
struct PrefetchedLists {
  Shared& shared;
  Ring<kPrefetchDepth> at;
  Ring<kPrefetchDepth + 1> tiles;
  const QTile* tile;

  __device__ __forceinline__ const QTile& Tile() const { return *tile; }
  __device__ __forceinline__ bool NextTile() {
    MbarrierWait(&shared.prefetched_full[at.index], at.parity);
    tile = &shared.prefetched_tile[tiles.index];
    tiles.Next();
    return tile->row >= 0;
  }
  __device__ __forceinline__ ListedTile NextKeys() {
    MbarrierWait(&shared.prefetched_full[at.index], at.parity);
    const ListedTile keys = shared.prefetched[at.index];
    MbarrierArrive(&shared.prefetched_empty[at.index]);
    at.Next();
    return keys;
  }
};

}  // namespace jax_flash::hopper::forward
