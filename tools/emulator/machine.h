// Interface of the emulated GPU. The threads of a cluster are coroutines; one runs until it has to wait. Asynchronous
// operations complete as late as possible: when a thread waits for them, or when no thread can continue. With
// JAX_FLASH_EMULATE_SEED the schedule is random, and so is the completion of copies that arrive at mbarriers.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda.h"

namespace emulator {

// Ends the launch with this error.
[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

using Task = std::function<void()>;

// Groups of asynchronous copies of one thread. They complete in order.
struct CopyGroups {
  std::vector<Task> open;
  std::deque<std::vector<Task>> groups;

  void Commit();
  void WaitForAllBut(size_t pending);
};

struct WgmmaQueue;  // tensor_cores.cc

struct Warp {
  const void* site = nullptr;  // of the collective operation that lanes have reached
  const char* what = nullptr;
  void* lanes[32];
  int arrived = 0;
  uint64_t rounds = 0;
  const void* fence = nullptr;  // the latest fence.proxy.async, and the lanes that have executed it
  uint32_t fenced = 0;
  std::shared_ptr<WgmmaQueue> wgmma;
};

struct Barrier {
  int arrived = 0, expected = 0;
  uint64_t phase = 0;
};

struct Block {
  int rank;              // among the blocks that run concurrently: those of its cluster, or all without clusters
  unsigned index, left;  // left: threads that have not finished
  uint8_t* shared;
  Barrier barriers[16];
  std::vector<Warp> warps;
  bool fence_pending = false;
};

struct Thread {
  Block* block;
  unsigned index;
  void* stack_pointer;
  bool done = false;

  // Blocked while word is not null and (*word & mask) == value.
  const uint64_t* word = nullptr;
  uint64_t mask, value;
  const char* what = nullptr;
  uint32_t where = 0;

  uint64_t cluster_phase = 0;
  CopyGroups cp_async, bulk;

  Warp& warp() const { return block->warps[index / 32]; }
  int lane() const { return index % 32; }
};

extern Thread* running;
inline Thread& Self() { return *running; }

// Blocks the thread while (*word & mask) == value. `what` and `where`, a shared address or a number, are for the report
// of a deadlock.
void WaitWhile(const uint64_t* word, uint64_t mask, uint64_t value, const char* what, uint32_t where);

// With a random schedule, other threads may run before this one continues.
void Yield();

// Lets all others run as long as they can.
void Sleep();

// Schedules a task that runs when no thread can continue, and that changes this word.
void Schedule(const uint64_t* word, Task task);

// A shared address is the rank of its block << 24 | the offset. Fails if any of the bytes is outside.
uint8_t* Shared(uint32_t address, uint32_t bytes, uint32_t alignment);

// The offset from shared memory to the copy that the asynchronous proxy sees (PTX ISA 8.5). The copy has what this
// proxy has written, and what threads had written before a fence.proxy.async. Call CompleteFences before reading it.
constexpr int kAsyncProxyOffset = 512 << 10;
void FenceProxyAsync(const void* site);
void CompleteFences(uint32_t rank);

void ArriveAt(int barrier, int threads, bool wait);
// %cluster_ctarank of this thread.
uint32_t ClusterRank();
void ArriveAtCluster();
void WaitForCluster();

// Runs a grid, one launch at a time. Clusters run one after the other, except that all blocks of Hopper's kernels run
// concurrently. Returns the error, or "".
std::string Launch(const Kernel& kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void** arguments);

// async.cc
std::string DescribeMbarrier(uint32_t address);

// custom_calls.cc, for the report of a segmentation fault: "byte n of array m", or the address.
std::string DescribeAddress(const void* address);

}  // namespace emulator
