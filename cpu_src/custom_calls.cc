// The custom calls for platform cpu. They check the buffers against the problem, choose the kernels for this processor,
// and run them on XLA's threads.
#include "cpu_src/custom_calls.h"

#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/buffers.h"
#include "common/problem.h"
#include "cpu_src/kernels.h"
#include "cpu_src/workers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;

struct Kernels {
  std::string_view isa;
  void (*forward)(const Problem&, const Operands&, const ForwardResults&, Workers&);
  void (*backward)(const Problem&, const Operands&, const Cotangents&, const BackwardResults&, Workers&);
  void (*tangent)(const Problem&, const Operands&, const Tangents&, const TangentResults&, Workers&);
};

// The kernels for the best instruction set of this processor. JAX_FLASH_CPU_ISA selects another one, for tests.
const Kernels& ChosenKernels() {
  static const Kernels chosen = [] {
    std::vector<Kernels> usable;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      usable.push_back({"avx512", avx512::Forward, avx512::Backward, avx512::Tangent});
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      usable.push_back({"avx2", avx2::Forward, avx2::Backward, avx2::Tangent});
    }
#endif
    usable.push_back({"portable", portable::Forward, portable::Backward, portable::Tangent});
    const char* const wanted = std::getenv("JAX_FLASH_CPU_ISA");
    for (const Kernels& kernels : usable) {
      if (!wanted || !*wanted || kernels.isa == wanted) return kernels;
    }
    throw std::invalid_argument("JAX_FLASH_CPU_ISA=" + std::string(wanted) + " is not available on this processor");
  }();
  return chosen;
}

Workers XlaWorkers(ffi::ThreadPool& pool) {
  return Workers(pool.num_threads(), [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
}

ffi::Error RunForward(ffi::ThreadPool& pool, const Problem& p, Buffers& buffers) {
  const Operands operands = buffers.TakeOperands();
  const ForwardResults results = buffers.TakeForwardResults();
  const std::string error = buffers.Error();
  if (!error.empty()) return ffi::Error::InvalidArgument("jax_flash_forward: " + error);
  Workers workers = XlaWorkers(pool);
  ChosenKernels().forward(p, operands, results, workers);
  return ffi::Error::Success();
}

ffi::Error RunBackward(ffi::ThreadPool& pool, const Problem& p, Buffers& buffers) {
  if (p.score.score_mod.present() && !p.score.score_grad.present()) {
    return ffi::Error::InvalidArgument("jax_flash_backward: score_mod without score_grad");
  }
  const Operands operands = buffers.TakeOperands();
  const Cotangents given = buffers.TakeCotangents();
  const BackwardResults results = buffers.TakeBackwardResults(p.accumulation_dtype());
  const std::string error = buffers.Error();
  if (!error.empty()) return ffi::Error::InvalidArgument("jax_flash_backward: " + error);
  Workers workers = XlaWorkers(pool);
  ChosenKernels().backward(p, operands, given, results, workers);
  return ffi::Error::Success();
}

ffi::Error RunTangent(ffi::ThreadPool& pool, const Problem& p, Buffers& buffers) {
  const Operands operands = buffers.TakeOperands();
  const Tangents given = buffers.TakeTangents();
  const TangentResults results = buffers.TakeTangentResults();
  const std::string error = buffers.Error();
  if (!error.empty()) return ffi::Error::InvalidArgument("jax_flash_tangent: " + error);
  Workers workers = XlaWorkers(pool);
  ChosenKernels().tangent(p, operands, given, results, workers);
  return ffi::Error::Success();
}

// A handler that converts exceptions into errors.
template <ffi::Error (*run)(ffi::ThreadPool&, const Problem&, Buffers&)>
ffi::Error Handle(ffi::ThreadPool pool, std::string_view text, ffi::RemainingArgs args, ffi::RemainingRets rets) try {
  Problem problem;
  const std::string error = Decode(text, &problem);
  if (!error.empty()) return ffi::Error::InvalidArgument("jax_flash: " + error);
  Buffers buffers(problem, args, rets);
  return run(pool, problem, buffers);
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_flash: out of memory");
} catch (const std::exception& e) {
  return ffi::Error::Internal(std::string("jax_flash: ") + e.what());
}

auto Signature() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<std::string_view>("problem").RemainingArgs().RemainingRets();
}

XLA_FFI_DEFINE_HANDLER(kForward, Handle<RunForward>, Signature());
XLA_FFI_DEFINE_HANDLER(kBackward, Handle<RunBackward>, Signature());
XLA_FFI_DEFINE_HANDLER(kTangent, Handle<RunTangent>, Signature());

}  // namespace

std::string_view CpuIsa() { return ChosenKernels().isa; }
void* CpuForwardHandler() { return reinterpret_cast<void*>(kForward); }
void* CpuBackwardHandler() { return reinterpret_cast<void*>(kBackward); }
void* CpuTangentHandler() { return reinterpret_cast<void*>(kTangent); }

}  // namespace jax_flash
