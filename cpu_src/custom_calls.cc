// The two custom calls for platform cpu: check the buffers against the problem, choose the kernels that this processor
// can run, run them on XLA's threads.
#include "cpu_src/custom_calls.h"

#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/problem.h"
#include "cpu_src/arrays.h"
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
};

// The best that the processor has; JAX_FLASH_CPU_ISA names a lesser one, for tests.
const Kernels& ChosenKernels() {
  static const Kernels chosen = [] {
    std::vector<Kernels> usable;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      usable.push_back({"avx512", avx512::Forward, avx512::Backward});
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      usable.push_back({"avx2", avx2::Forward, avx2::Backward});
    }
#endif
    usable.push_back({"portable", portable::Forward, portable::Backward});
    const char* const wanted = std::getenv("JAX_FLASH_CPU_ISA");
    for (const Kernels& kernels : usable) {
      if (!wanted || kernels.isa == wanted) return kernels;
    }
    throw std::invalid_argument("JAX_FLASH_CPU_ISA=" + std::string(wanted) + " is not to be had on this processor");
  }();
  return chosen;
}

using Dims = std::vector<int64_t>;

std::string Text(ffi::DataType dtype, ffi::Span<const int64_t> dims) {
  std::string text;
  switch (dtype) {
    case ffi::PRED:
      text = "pred";
      break;
    case ffi::S32:
      text = "s32";
      break;
    case ffi::U32:
      text = "u32";
      break;
    case ffi::F16:
      text = "f16";
      break;
    case ffi::BF16:
      text = "bf16";
      break;
    case ffi::F32:
      text = "f32";
      break;
    case ffi::F64:
      text = "f64";
      break;
    default:
      text = "dtype " + std::to_string(int(dtype));
  }
  text += "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

ffi::DataType XlaType(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return ffi::F16;
    case DType::kBF16:
      return ffi::BF16;
    case DType::kF32:
      return ffi::F32;
    case DType::kF64:
      return ffi::F64;
    case DType::kNone:
      break;
  }
  return ffi::DataType::INVALID;
}

// Takes the buffers of a call one after the other. The first that is not as expected ends up in `error`.
class Buffers {
 public:
  Buffers(const Problem& problem, ffi::RemainingArgs args, ffi::RemainingRets rets)
      : p_(problem), args_(args), rets_(rets) {}

  const void* Operand(const char* name, bool present, ffi::DataType dtype, const Dims& dims) {
    if (!present || !error_.empty()) return nullptr;
    auto buffer = args_.get<ffi::AnyBuffer>(args_taken_++);
    if (!buffer) {
      error_ = "operand " + std::string(name) + " is missing";
      return nullptr;
    }
    return Checked("operand ", name, *buffer, dtype, dims);
  }

  void* Result(const char* name, bool present, ffi::DataType dtype, const Dims& dims) {
    if (!present || !error_.empty()) return nullptr;
    auto buffer = rets_.get<ffi::AnyBuffer>(rets_taken_++);
    if (!buffer) {
      error_ = "result " + std::string(name) + " is missing";
      return nullptr;
    }
    return Checked("result ", name, **buffer, dtype, dims);
  }

  // The operands that both custom calls start with.
  Operands TakeOperands() {
    const ffi::DataType dtype = XlaType(p_.dtype);
    Operands in;
    in.query = Operand("query", true, dtype, {p_.batch, p_.q_len, p_.q_heads, p_.qk_dim});
    in.key = Operand("key", true, dtype, {p_.batch, p_.kv_len, p_.kv_heads, p_.qk_dim});
    in.value = Operand("value", true, dtype, {p_.batch, p_.kv_len, p_.kv_heads, p_.v_dim});
    in.bias = Operand("bias", p_.bias.present, XlaType(p_.bias_dtype), Shape(p_.bias));
    in.mask = static_cast<const uint8_t*>(Operand("mask", p_.mask.present, ffi::PRED, Shape(p_.mask)));
    const auto integers = [&](const char* name, bool present, const Dims& dims) {
      return static_cast<const int32_t*>(Operand(name, present, ffi::S32, dims));
    };
    in.q_lengths = integers("q_lengths", p_.q_lengths, {p_.batch});
    in.kv_lengths = integers("kv_lengths", p_.kv_lengths, {p_.batch});
    in.q_segments = integers("q_segments", p_.segments, {p_.batch, p_.q_len});
    in.kv_segments = integers("kv_segments", p_.segments, {p_.batch, p_.kv_len});
    in.query_offset = integers("query_offset", p_.query_offset, {p_.batch});
    const auto words = [&](const char* name, const Dims& dims) {
      return static_cast<const uint32_t*>(Operand(name, p_.dropout(), ffi::U32, dims));
    };
    in.seed = words("seed", {p_.batch, 2});
    in.batch_id = words("batch_id", {p_.batch});
    in.head_id = words("head_id", {p_.q_heads});
    return in;
  }

  Dims Shape(const Extent& extent) const {
    return {extent.batch ? p_.batch : 1, extent.heads ? p_.q_heads : 1, extent.rows ? p_.q_len : 1,
            extent.columns ? p_.kv_len : 1};
  }

  // What is wrong with the buffers, once all have been taken; empty if nothing is.
  std::string Error() const {
    if (!error_.empty()) return error_;
    if (args_.size() != args_taken_) return "too many operands: " + std::to_string(args_.size());
    if (rets_.size() != rets_taken_) return "too many results: " + std::to_string(rets_.size());
    return "";
  }

 private:
  void* Checked(const char* kind, const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                const Dims& dims) {
    const ffi::Span<const int64_t> actual = buffer.dimensions();
    bool same = buffer.element_type() == dtype && actual.size() == dims.size();
    for (size_t i = 0; same && i < dims.size(); ++i) same = actual[i] == dims[i];
    if (same) return buffer.untyped_data();
    error_ = std::string(kind) + name + " is " + Text(buffer.element_type(), actual) + ", the problem says " +
             Text(dtype, ffi::Span<const int64_t>(dims.data(), dims.size()));
    return nullptr;
  }

  const Problem& p_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  size_t args_taken_ = 0, rets_taken_ = 0;
  std::string error_;
};

ffi::DataType StatisticsType(const Problem& p) { return p.dtype == DType::kF64 ? ffi::F64 : ffi::F32; }

Workers XlaWorkers(ffi::ThreadPool& pool) {
  return Workers(pool.num_threads(), [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
}

ffi::Error RunForward(ffi::ThreadPool& pool, const Problem& p, Buffers& buffers) {
  const Operands operands = buffers.TakeOperands();
  ForwardResults results;
  const Dims statistics = {p.batch, p.q_heads, p.q_len};
  results.o = buffers.Result("o", true, XlaType(p.dtype), {p.batch, p.q_len, p.q_heads, p.v_dim});
  results.l = buffers.Result("l", true, StatisticsType(p), statistics);
  results.m = buffers.Result("m", true, StatisticsType(p), statistics);
  const std::string error = buffers.Error();
  if (!error.empty()) return ffi::Error::InvalidArgument("jax_flash_forward: " + error);
  Workers workers = XlaWorkers(pool);
  ChosenKernels().forward(p, operands, results, workers);
  return ffi::Error::Success();
}

ffi::Error RunBackward(ffi::ThreadPool& pool, const Problem& p, Buffers& buffers) {
  const Operands operands = buffers.TakeOperands();
  const ffi::DataType dtype = XlaType(p.dtype);
  const Dims output = {p.batch, p.q_len, p.q_heads, p.v_dim}, statistics = {p.batch, p.q_heads, p.q_len};
  Cotangents given;
  given.o = buffers.Operand("o", true, dtype, output);
  given.l = buffers.Operand("l", true, StatisticsType(p), statistics);
  given.m = buffers.Operand("m", true, StatisticsType(p), statistics);
  given.d_o = buffers.Operand("do", true, dtype, output);
  given.dlogsumexp = buffers.Operand("dlogsumexp", p.dlogsumexp, StatisticsType(p), statistics);
  BackwardResults results;
  results.dq = buffers.Result("dq", p.dq, dtype, {p.batch, p.q_len, p.q_heads, p.qk_dim});
  results.dk = buffers.Result("dk", p.dk, dtype, {p.batch, p.kv_len, p.kv_heads, p.qk_dim});
  results.dv = buffers.Result("dv", p.dv, dtype, {p.batch, p.kv_len, p.kv_heads, p.v_dim});
  results.dbias = buffers.Result("dbias", p.dbias, StatisticsType(p), buffers.Shape(p.bias));
  const std::string error = buffers.Error();
  if (!error.empty()) return ffi::Error::InvalidArgument("jax_flash_backward: " + error);
  Workers workers = XlaWorkers(pool);
  ChosenKernels().backward(p, operands, given, results, workers);
  return ffi::Error::Success();
}

// A handler with all that can go wrong turned into an error.
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

}  // namespace

std::string_view CpuIsa() { return ChosenKernels().isa; }
void* CpuForwardHandler() { return reinterpret_cast<void*>(kForward); }
void* CpuBackwardHandler() { return reinterpret_cast<void*>(kBackward); }

}  // namespace jax_flash
