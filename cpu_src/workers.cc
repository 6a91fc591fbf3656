#include "cpu_src/workers.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>

namespace jax_flash {

void Workers::Free::operator()(char* memory) const { operator delete[](memory, std::align_val_t(64)); }

Workers::Memory Workers::NewMemory(int64_t bytes) {
  return Memory(static_cast<char*>(operator new[](size_t(bytes), std::align_val_t(64))));
}

char* Workers::Allocate(int64_t bytes) {
  allocated_.push_back(NewMemory(bytes));
  return allocated_.back().get();
}

// The calling thread takes units itself. It waits only for units that another thread has started, never for a task to
// start, because all threads of the pool may be callers that wait. A task that starts after the last unit finds none.
// It may outlive the call, and shares only `Loop` with it.
void Workers::Run(int64_t units, int64_t scratch_bytes, Body body, void* context) {
  struct Loop {
    std::atomic<int64_t> next{0}, workers{0};
    int64_t done = 0;  // under `mutex`
    std::mutex mutex;
    std::condition_variable all_done;
  };
  if (units == 0) return;
  const int64_t threads = units < threads_ ? units : threads_;
  const Memory scratch = NewMemory(threads * scratch_bytes);
  const auto loop = std::make_shared<Loop>();
  const auto work = [loop, units, body, context, scratch = scratch.get(), scratch_bytes] {
    int64_t unit = loop->next++;
    if (unit >= units) return;
    char* const own = scratch + loop->workers++ * scratch_bytes;
    int64_t done = 0;
    for (; unit < units; unit = loop->next++, ++done) body(context, unit, own);
    const std::lock_guard<std::mutex> lock(loop->mutex);
    loop->done += done;
    if (loop->done == units) loop->all_done.notify_all();
  };
  try {
    for (int64_t i = 1; i < threads; ++i) schedule_(work);
  } catch (const std::bad_alloc&) {
    // Continue with fewer threads: scheduled tasks may already use the scratch.
  }
  work();
  std::unique_lock<std::mutex> lock(loop->mutex);
  loop->all_done.wait(lock, [&] { return loop->done == units; });
}

}  // namespace jax_flash
