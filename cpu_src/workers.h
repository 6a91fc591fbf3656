// A parallel loop: free threads take independent units of work.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace jax_flash {

class Workers {
 public:
  // `schedule` runs a task on another thread, at any later time. `threads` includes the calling thread.
  Workers(int64_t threads, std::function<void(std::function<void()>)> schedule)
      : threads_(threads < 1 ? 1 : threads), schedule_(std::move(schedule)) {}

  int64_t threads() const { return threads_; }

  // Memory for this call, aligned to cache lines.
  char* Allocate(int64_t bytes);

  // Calls f(unit, scratch) for 0 <= unit < units. Each thread has `scratch_bytes` of scratch.
  template <typename F>
  void For(int64_t units, int64_t scratch_bytes, F f) {
    Run(units, scratch_bytes, [](void* f, int64_t unit, char* scratch) { (*static_cast<F*>(f))(unit, scratch); }, &f);
  }

 private:
  using Body = void (*)(void* context, int64_t unit, char* scratch);

  void Run(int64_t units, int64_t scratch_bytes, Body body, void* context);

  struct Free {
    void operator()(char* memory) const;
  };
  using Memory = std::unique_ptr<char[], Free>;
  static Memory NewMemory(int64_t bytes);

  int64_t threads_;
  std::function<void(std::function<void()>)> schedule_;
  std::vector<Memory> allocated_;
};

}  // namespace jax_flash
