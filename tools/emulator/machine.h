// The emulated GPU as its parts see it. The threads of a cluster of blocks are coroutines, of which one runs until it
// has to wait. What is asynchronous happens as late as a program allows: when a thread waits for just that, or when no
// thread can go on. With JAX_FLASH_EMULATE_SEED turns are random instead, and so is when copies that mbarriers wait for
// land.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda.h"

namespace emulator {

// Ends the launch with this text.
[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

using Task = std::function<void()>;

// Asynchronous copies of one thread: groups, done in their order.
struct CopyGroups {
  std::vector<Task> open;
  std::deque<std::vector<Task>> groups;

  void Commit();
  void WaitForAllBut(size_t pending);
};

struct WgmmaQueue;  // tensor_cores.cc

struct Warp {
  const void* site = nullptr;  // of what its lanes do together
  const char* what = nullptr;
  void* lanes[32];
  int arrived = 0;
  uint64_t rounds = 0;
  std::shared_ptr<WgmmaQueue> wgmma;
};

struct Barrier {
  int arrived = 0, expected = 0;
  uint64_t phase = 0;
};

struct Block {
  int rank;              // in its cluster
  unsigned index, left;  // left: threads that have not ended
  uint8_t* shared;
  Barrier barriers[16];
  std::vector<Warp> warps;
};

struct Thread {
  Block* block;
  unsigned index;
  void* stack_pointer;
  bool done = false;

  // Blocked as long as (*word & mask) == value; if word is null it is not.
  const uint64_t* word = nullptr;
  uint64_t mask, value;
  const char* what = nullptr;
  uint32_t where = 0;

  uint64_t cluster_phase = 0;
  CopyGroups cp_async, bulk;

  Warp& warp() const { return block->warps[index / 32]; }
  int lane() const { return index % 32; }
};

// The thread that runs.
Thread& Self();

// Blocks it as long as (*word & mask) == value. For the report of a deadlock: what it waits for, at which shared
// address or number.
void WaitWhile(const uint64_t* word, uint64_t mask, uint64_t value, const char* what, uint32_t where);

// If the schedule is random, others may go on before it does.
void Yield();

// Lets all others go on as long as they can.
void Sleep();

// Something that will happen when nobody can go on, and will change this word.
void Later(const uint64_t* word, Task task);

// A shared address is the rank of its block << 24 | the offset. Fails if anything of these bytes is outside.
uint8_t* Shared(uint32_t address, uint32_t bytes, uint32_t alignment);

// So far from shared memory there is what the asynchronous proxy sees of it (8.5): what it has written itself, and what
// threads had written when one of them came to fence.proxy.async.
constexpr int kToSeen = 512 << 10;
void FenceProxyAsync();

void ArriveAt(int barrier, int threads, bool wait);
void ArriveAtCluster();
void WaitForCluster();

// Runs a grid; one launch at a time. Blocks run one cluster after the other, but those of Hopper's kernels together. ""
// if all went well.
std::string Launch(const Kernel& kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void** arguments);

// async.cc
std::string DescribeMbarrier(uint32_t address);

// custom_calls.cc, for the report of a segmentation fault: "byte n of array m", or the address
std::string DescribeAddress(const void* address);

}  // namespace emulator
