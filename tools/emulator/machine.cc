#include "machine.h"

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cfenv>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <set>

uint3 threadIdx, blockIdx, blockDim, gridDim;

// Saves the callee-saved registers on this stack, and continues on the other stack.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
  .text
  .globl emulator_switch
  .type emulator_switch, @function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10, kPage = 4096, kWindowBytes = 256 << 10;
// With few blocks, each block of a persistent grid has several tiles.
constexpr unsigned kPersistentBlocks = 4;
constexpr uint8_t kUnwritten = 0xFF;  // NaN in every format

// Averages in a random schedule: switches until another warp is delayed, and until a copy completes.
constexpr size_t kSwitchesOfDelay = 1 << 16, kSwitchesToCompletion = 64;

// --- Memory ---

uint8_t* Map(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  return static_cast<uint8_t*>(memory);
}

// The end of the n-th stack. The page below the stack is inaccessible.
uint8_t* StackEnd(size_t n) {
  static std::vector<uint8_t*> ends;
  while (ends.size() <= n) {
    uint8_t* const begin = Map(kStackBytes + kPage);
    mprotect(begin + kPage, kStackBytes, PROT_READ | PROT_WRITE);
    ends.push_back(begin + kPage + kStackBytes);
  }
  return ends[n];
}

// The shared memory of the block of this rank. Memory after its end is inaccessible.
uint8_t* SharedWindow(size_t rank, size_t bytes) {
  static std::vector<uint8_t*> windows;
  while (windows.size() <= rank) {
    windows.push_back(Map(kWindowBytes + kAsyncProxyOffset + kPage) + kPage);
    for (const int part : {0, kAsyncProxyOffset}) mprotect(windows.back() + part, kWindowBytes, PROT_READ | PROT_WRITE);
  }
  const size_t used = (bytes + 1023) / 1024 * 1024;
  for (const int part : {0, kAsyncProxyOffset}) std::memset(windows[rank] + part, kUnwritten, kWindowBytes);
  return windows[rank] + kWindowBytes - used;
}

// --- The running launch ---

struct Event {
  const uint64_t* word;  // that the task changes
  Task task;
};

struct State {
  unsigned shared_bytes;
  const Kernel* kernel;
  void** arguments;
  int concurrent;            // number of blocks that run concurrently
  std::deque<Block> blocks;  // these blocks
  std::vector<Thread> threads;
  size_t left;  // the number of unfinished threads
  std::vector<Event> later;
  std::optional<std::mt19937> random;  // set if the schedule is random
  size_t delayed_warp;
  Barrier cluster;
  uint64_t wakeups;  // how often sleeping threads were woken up
  int idle_wakeups;  // wakeups since the last event
  void* host_stack;
  std::string error;
};
State* state;

// --- Scheduling ---

[[noreturn]] void LeaveLaunch() {
  void* nowhere;
  emulator_switch(&nowhere, state->host_stack);
  __builtin_unreachable();
}

void Resume() {
  const Thread& self = Self();
  threadIdx = {self.index, 0, 0};
  blockIdx = {self.block->index, 0, 0};
}

bool CanRun(Thread& thread) {
  if (thread.done) return false;
  if (thread.word && (*thread.word & thread.mask) == thread.value) return false;
  thread.word = nullptr;
  return true;
}

[[noreturn]] void Deadlock() {
  std::string text = "deadlock: ";
  const auto same = [](const Thread& a, const Thread& b) {
    return a.block == b.block && a.done == b.done && a.what == b.what && a.where == b.where;
  };
  const auto& threads = state->threads;
  for (size_t first = 0, end; first < threads.size(); first = end) {
    for (end = first + 1; end < threads.size() && same(threads[first], threads[end]);) ++end;
    const Thread& thread = threads[first];
    if (thread.done) continue;
    text += "\n  block " + std::to_string(thread.block->index) + ", threads " + std::to_string(thread.index) + "-" +
            std::to_string(threads[end - 1].index) + " wait for " + thread.what + " ";
    const bool mbarrier = thread.what[0] == 'm' && thread.what[1] == 'b';
    text += mbarrier ? DescribeMbarrier(thread.where) : std::to_string(thread.where);
  }
  Fail("%s", text.c_str());
}

// Wakes up sleeping threads when no other can continue. After many wakeups without an event this is a deadlock.
void WakeUp() {
  constexpr int kMany = 1000;
  if (++state->idle_wakeups > kMany) Deadlock();
  ++state->wakeups;
}

// Switches to a thread if it can continue.
bool SwitchTo(size_t next) {
  if (!CanRun(state->threads[next])) return false;
  Thread& self = Self();
  running = &state->threads[next];
  if (&self != running) emulator_switch(&self.stack_pointer, running->stack_pointer);
  Resume();
  return true;
}

// Switches to the first lane of a warp, starting at `lane`, that can continue.
bool SwitchToWarp(size_t warp, size_t lane) {
  for (size_t n = 0; n < 32; ++n) {
    if (SwitchTo(warp * 32 + (lane + n) % 32)) return true;
  }
  return false;
}

void RunEvent(size_t event) {
  const Task task = std::move(state->later[event].task);
  state->later.erase(state->later.begin() + event);
  state->idle_wakeups = 0;
  task();
}

// Returns the last scheduled event that a thread waits for, or the last event. Earlier events would hide missing waits.
size_t LatestAwaited() {
  const auto& later = state->later;
  const auto awaited = [](const Event& event) {
    return std::any_of(state->threads.begin(), state->threads.end(),
                       [&](const Thread& thread) { return !thread.done && thread.word == event.word; });
  };
  const auto latest = std::find_if(later.rbegin(), later.rend(), awaited);
  return latest == later.rend() ? later.size() - 1 : later.rend() - latest - 1;
}

size_t Random(size_t end) { return (*state->random)() % end; }

// Runs any thread, and completes copies at any time. But one warp is delayed until no other can continue, or until
// chance selects another one. Warps that fail to wait for it get ahead of it by a phase.
void SwitchAtRandom() {
  const size_t warps = state->threads.size() / 32;
  while (true) {
    if (Random(kSwitchesOfDelay) == 0) state->delayed_warp = Random(warps);
    if (!state->later.empty() && Random(kSwitchesToCompletion) == 0) RunEvent(Random(state->later.size()));
    const size_t first = Random(warps), lane = Random(32);
    for (size_t n = 0; n < warps; ++n) {
      const size_t warp = (first + n) % warps;
      if (warp != state->delayed_warp && SwitchToWarp(warp, lane)) return;
    }
    if (state->later.empty()) {
      const size_t late = std::exchange(state->delayed_warp, Random(warps));
      if (SwitchToWarp(late, lane)) return;
      WakeUp();
      continue;
    }
    RunEvent(Random(state->later.size()));
  }
}

// Maps n to the n-th thread of the schedule, and back. Half of the clusters run in reverse order, to find missing waits
// for earlier and for later threads.
size_t ScheduleOrder(size_t n) {
  const size_t cluster = state->kernel->cluster, size = cluster * blockDim.x;
  return (state->blocks[0].index / cluster + n / size) % 2 == 0 ? n : n / size * size + size - 1 - n % size;
}

// Switches to another thread or back to this one. Lanes of the same warp come first, which makes warps diverge far.
void Switch() {
  if (state->random) return SwitchAtRandom();
  const size_t count = state->threads.size(), self = running - state->threads.data();
  while (true) {
    if (SwitchToWarp(self / 32, self + 1)) return;
    for (size_t n = 1; n < count; ++n) {
      if (SwitchTo(ScheduleOrder((ScheduleOrder(self) + n) % count))) return;
    }
    if (state->later.empty()) {
      WakeUp();
    } else {
      RunEvent(LatestAwaited());
    }
  }
}

void ThreadMain() {
  Resume();
  state->kernel->call(state->arguments);
  Thread& self = Self();
  self.bulk.Commit();
  self.bulk.WaitForAllBut(0);
  self.done = true;
  --self.block->left;
  if (--state->left == 0) LeaveLaunch();
  Switch();
}

void* NewStack(size_t n) {
  void** const end = reinterpret_cast<void**>(StackEnd(n));
  end[-1] = nullptr;  // the return address of ThreadMain
  end[-2] = reinterpret_cast<void*>(&ThreadMain);
  std::memset(end - 8, 0, 6 * sizeof(void*));
  return end - 8;
}

// Runs blocks concurrently, beginning at `first`.
void RunBlocks(unsigned first, unsigned threads) {
  state->blocks.clear(), state->threads.clear(), state->later.clear();
  state->cluster = {};
  for (int rank = 0; rank < state->concurrent; ++rank) {
    Block block = {rank, first + rank, threads, SharedWindow(rank, state->shared_bytes), {}, {}, false};
    block.warps.resize(threads / 32);
    state->blocks.push_back(std::move(block));
  }
  state->threads.resize(state->concurrent * threads);
  for (size_t n = 0; n < state->threads.size(); ++n) {
    Thread& thread = state->threads[n];
    thread.block = &state->blocks[n / threads], thread.index = n % threads;
    thread.stack_pointer = NewStack(n);
  }
  running = &state->threads[state->random ? Random(state->threads.size()) : ScheduleOrder(0)];
  state->left = state->threads.size();
  emulator_switch(&state->host_stack, Self().stack_pointer);
  if (!state->error.empty()) return;
  if (!state->later.empty()) state->error = "the blocks have ended before their copies";
  for (const Block& block : state->blocks) {
    const uint8_t* const window = block.shared;
    const uint8_t* const end = window + (state->shared_bytes + 1023) / 1024 * 1024;
    if (std::any_of(window + state->shared_bytes, end, [](uint8_t x) { return x != kUnwritten; })) {
      state->error = "block " + std::to_string(block.index) + " wrote beyond its shared memory";
    }
  }
}

void OnSegmentationFault(int, siginfo_t* info, void*) {
  const uint8_t* const at = static_cast<uint8_t*>(info->si_addr);
  for (const Block& block : state->blocks) {
    const int64_t offset = at - block.shared;
    if (-int64_t(kWindowBytes) < offset && offset < int64_t(kWindowBytes)) {
      Fail("touched byte %ld of the %u of shared memory", long(offset), state->shared_bytes);
    }
  }
  Fail("touched %s", DescribeAddress(at).c_str());
}

}  // namespace

Thread* running;

void Fail(const char* format, ...) {
  char text[8192];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const Thread& self = Self();
  state->error = "block " + std::to_string(self.block->index) + ", thread " + std::to_string(self.index) + ": " + text;
  LeaveLaunch();
}

void CopyGroups::Commit() {
  groups.push_back(std::move(open));
  open.clear();
}

void CopyGroups::WaitForAllBut(size_t pending) {
  for (; groups.size() > pending; groups.pop_front()) {
    for (const Task& task : groups.front()) task();
  }
}

void Yield() {
  if (state->random) Switch();
}

void WaitWhile(const uint64_t* word, uint64_t mask, uint64_t value, const char* what, uint32_t where) {
  if (!state->random && (*word & mask) != value) return;  // if random, it may continue after the next change only
  Thread& self = Self();
  self.word = word, self.mask = mask, self.value = value, self.what = what, self.where = where;
  Switch();
}

void Sleep() { WaitWhile(&state->wakeups, ~uint64_t(0), state->wakeups, "nanosleep", 0); }

void Schedule(const uint64_t* word, Task task) { state->later.push_back({word, std::move(task)}); }

uint8_t* DynamicShared() { return Self().block->shared; }

uint32_t SharedAddress(const void* generic) {
  const Block& block = *Self().block;
  const int64_t offset = static_cast<const uint8_t*>(generic) - block.shared;
  if (offset < 0 || offset > int64_t(state->shared_bytes)) Fail("%p is not in shared memory", generic);
  return uint32_t(block.rank) << 24 | uint32_t(offset);
}

uint8_t* Shared(uint32_t address, uint32_t bytes, uint32_t alignment) {
  const uint32_t rank = address >> 24, offset = address & 0xFFFFFF;
  if (rank >= state->blocks.size() || offset + bytes > state->shared_bytes) {
    Fail("%u bytes at %u of block %u of the cluster: there are %u", bytes, offset, rank, state->shared_bytes);
  }
  if (state->blocks[rank].left == 0) Fail("block %u of the cluster has ended, and its shared memory with it", rank);
  if (offset % alignment != 0) Fail("shared address %u is not a multiple of %u", offset, alignment);
  return state->blocks[rank].shared + offset;
}

void CompleteFences(uint32_t rank) {
  Block& block = state->blocks[rank];
  if (!block.fence_pending) return;
  std::memcpy(block.shared + kAsyncProxyOffset, block.shared, state->shared_bytes);
  block.fence_pending = false;
}

// A copy of all shared memory for each thread would take most of the time. So the last lane of a warp copies for all,
// if all lanes of some warp have executed the fence at this site before.
void FenceProxyAsync(const void* site) {
  static std::set<const void*> of_whole_warps;
  Block& block = *Self().block;
  Warp& warp = Self().warp();
  if (warp.fence != site) warp.fence = site, warp.fenced = 0;
  warp.fenced |= 1u << Self().lane();
  block.fence_pending = true;
  const bool last = warp.fenced == 0xFFFFFFFF;
  if (last) of_whole_warps.insert(site), warp.fenced = 0;
  if (last || !of_whole_warps.count(site)) CompleteFences(block.rank);
}

void WarpCollective(const void* site, void* mine, void (*compute)(void* const* lanes), const char* what) {
  Thread& self = Self();
  Warp& warp = self.warp();
  if (warp.arrived == 0) warp.site = site, warp.what = what;
  if (warp.site != site) Fail("at %s, other lanes of the warp at %s", what, warp.what);
  warp.lanes[self.lane()] = mine;
  if (++warp.arrived < 32) return WaitWhile(&warp.rounds, ~uint64_t(0), warp.rounds, what, self.index / 32);
  compute(warp.lanes);
  warp.arrived = 0;
  ++warp.rounds;
}

void ArriveAt(int id, int threads, bool wait) {
  if (id < 0 || id > 15 || threads % 32 != 0) Fail("barrier %d of %d threads", id, threads);
  Barrier& barrier = Self().block->barriers[id];
  if (barrier.arrived == 0) barrier.expected = threads;
  if (barrier.expected != threads) Fail("barrier %d of %d threads, of %d for others", id, threads, barrier.expected);
  const uint64_t phase = barrier.phase;
  if (++barrier.arrived == threads) barrier.arrived = 0, ++barrier.phase;
  if (!wait) return Yield();
  WaitWhile(&barrier.phase, ~uint64_t(0), phase, "barrier", id);
}

void SyncThreads() { ArriveAt(0, blockDim.x, true); }

uint32_t ClusterRank() { return state->kernel->cluster == 1 ? 0 : Self().block->rank; }

void ArriveAtCluster() {
  Barrier& barrier = state->cluster;
  Self().cluster_phase = barrier.phase;
  if (++barrier.arrived == int(state->threads.size())) barrier.arrived = 0, ++barrier.phase;
}

void WaitForCluster() {
  WaitWhile(&state->cluster.phase, ~uint64_t(0), Self().cluster_phase, "barrier.cluster of rank", Self().block->rank);
}

std::string Launch(const Kernel& kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void** arguments) {
  if (blocks == 0 || threads == 0 || threads > 1024 || threads % 32 != 0 || shared_bytes > 227 * 1024) {
    return "a grid that cannot be: " + std::to_string(blocks) + " x " + std::to_string(threads);
  }
  // Only Hopper's kernels have this many threads and dynamic shared memory. Without clusters their grids are
  // persistent: with fewer blocks, each has more tiles.
  const bool hopper = threads >= 384 && shared_bytes > 0;
  if (blocks % kernel.cluster != 0) return std::to_string(blocks) + " blocks in clusters of several";
  if (hopper && kernel.cluster == 1) blocks = std::min(blocks, kPersistentBlocks);
  State launch = {};
  launch.shared_bytes = shared_bytes, launch.kernel = &kernel, launch.arguments = arguments;
  if (const char* const seed = std::getenv("JAX_FLASH_EMULATE_SEED")) launch.random.emplace(std::atoi(seed));
  state = &launch;
  blockDim = {threads, 1, 1}, gridDim = {blocks, 1, 1};
  std::fenv_t environment;  // XLA's threads flush subnormal numbers to zero
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  struct sigaction action = {}, before;
  action.sa_sigaction = OnSegmentationFault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
  launch.concurrent = hopper && kernel.cluster == 1 ? int(blocks) : kernel.cluster;  // they may wait for each other
  for (unsigned first = 0; first < blocks && launch.error.empty(); first += launch.concurrent) {
    RunBlocks(first, threads);
  }
  sigaction(SIGSEGV, &before, nullptr);
  std::fesetenv(&environment);
  state = nullptr;
  return launch.error;
}

}  // namespace emulator
