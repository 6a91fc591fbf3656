// The custom calls for platform CUDA. XLA calls a handler for each stage of a program's life:
//   instantiate   when the program is compiled or loaded: compile the kernels for the GPUs of this process
//   initialize    before it runs on a device: load the kernels there
//   execute       check the buffers, encode tensor maps, launch on XLA's stream. It may be captured into a CUDA graph.
//                 So it does not wait, allocate device memory or depend on the contents of buffers.
#include "cuda_src/custom_calls.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/buffers.h"
#include "common/problem.h"
#include "cuda_src/compiled_plan.h"
#include "cuda_src/contract.h"
#include "cuda_src/driver.h"
#include "cuda_src/element.h"
#include "cuda_src/jit.h"
#include "cuda_src/plan/mask_blocks.h"
#include "cuda_src/plan/plan.h"
#include "cuda_src/tensor_maps.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

const char* NameOf(Pass pass) {
  switch (pass) {
    case Pass::kForward:
      return "jax_flash_forward";
    case Pass::kBackward:
      return "jax_flash_backward";
    default:
      return "jax_flash_tangent";
  }
}

// --- Before there are buffers ---

struct LoadedLaunch {
  void* function;
  unsigned blocks, threads, shared_bytes;
  int64_t zero_bytes;
  Maps maps;
  KernelTiling tiling;
};

// The kernels of a call on one device.
struct Loaded {
  Scratch scratch;
  std::vector<LoadedLaunch> launches;
};

// A problem, and its kernels on each device.
class Call {
 public:
  Call(Pass pass, const Problem& problem) : pass(pass), p(problem) {}

  // Compiles for the GPUs of this process. If only some GPUs are unsupported, the error comes when the program is
  // loaded there. If all are, it comes now.
  void Compile() const {
    bool compiled = false;
    std::exception_ptr refusal;
    for (const Device& device : CudaDevices()) {
      try {
        const std::string arch = ArchOf(device.major, device.minor);
        CompiledPlan(p, pass, TargetOf(device), arch);
        compiled = true;
      } catch (const std::invalid_argument&) {
        refusal = std::current_exception();
      }
    }
    if (!compiled && refusal) std::rethrow_exception(refusal);
  }

  void Load(int device) {
    if (LoadedOn(device)) return;
    const std::lock_guard<std::mutex> lock(loading_);
    if (LoadedOn(device)) return;
    const Driver& driver = CudaDriver();
    const Device& properties = CudaDevices().at(device);
    const std::string arch = ArchOf(properties.major, properties.minor);
    const Plan plan = CompiledPlan(p, pass, TargetOf(properties), arch);
    const std::vector<Unit> units = UnitsOf(plan);
    const PrimaryContext context(device);
    auto loaded = std::make_unique<Loaded>();
    loaded->scratch = plan.scratch;
    for (const Launch& launch : plan.launches) {
      const Unit& unit = units[launch.unit];
      const int shared_bytes = launch.dynamic_shared ? SharedBytes(CachedKernels(unit, arch).cubin) : 0;
      const int64_t blocks = BlocksOf(launch, properties.multiprocessors);
      void* function = nullptr;
      Check(driver.cuModuleGetFunction(&function, LoadedModule(unit, arch, device), launch.entry.c_str()),
            launch.entry.c_str());
      if (shared_bytes > 0) {
        Check(driver.cuFuncSetAttribute(function, kMaxDynamicShared, shared_bytes),
              (launch.entry + ", " + std::to_string(shared_bytes) + " bytes of shared memory").c_str());
      }
      loaded->launches.push_back({function, unsigned(blocks), unsigned(launch.threads), unsigned(shared_bytes),
                                  launch.zero_bytes, launch.maps, unit.config.tiling});
    }
    loaded_.at(device).store(loaded.release(), std::memory_order_release);
  }

  const Loaded* LoadedOn(int device) const { return loaded_.at(device).load(std::memory_order_acquire); }

  const Pass pass;
  const Problem p;

 private:
  // Makes XLA's context current in this thread.
  struct PrimaryContext {
    explicit PrimaryContext(int device) {
      void* context = nullptr;
      Check(CudaDriver().cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
      Check(CudaDriver().cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
    }
    ~PrimaryContext() {
      void* context = nullptr;
      CudaDriver().cuCtxPopCurrent_v2(&context);
    }
  };

  std::mutex loading_;
  std::array<std::atomic<const Loaded*>, 64> loaded_ = {};  // by device; never freed
};

// Every stage finds its call by the text of its problem, so XLA stores no state for us.
Call& CallOf(Pass pass, std::string_view text) {
  static std::shared_mutex mutex;
  static auto& calls = *new std::array<std::map<std::string, std::unique_ptr<Call>, std::less<>>, 3>();
  auto& of_pass = calls[int(pass)];
  {
    const std::shared_lock<std::shared_mutex> lock(mutex);
    if (const auto found = of_pass.find(text); found != of_pass.end()) return *found->second;
  }
  Problem problem;
  const std::string error = Decode(text, &problem);
  if (!error.empty()) throw std::invalid_argument(error);
  const std::lock_guard<std::shared_mutex> lock(mutex);
  std::unique_ptr<Call>& call = of_pass[std::string(text)];
  if (!call) call = std::make_unique<Call>(pass, problem);
  return *call;
}

// --- Buffers -> Params ---

// The strides in elements of a bias or mask, with 0 for broadcast dimensions.
template <typename T>
Broadcast<T> BroadcastOf(T* data, const Extent& extent, const Problem& p) {
  Broadcast<T> x = {data, 0, 0, 0, 0};
  int64_t stride = 1;
  const auto next = [&](bool full, int64_t size) {
    const int64_t here = full ? stride : 0;
    if (full) stride *= size;
    return here;
  };
  x.column = next(extent.columns, p.kv_len);
  x.row = next(extent.rows, p.q_len);
  x.head = next(extent.heads, p.q_heads);
  x.batch = next(extent.batch, p.batch);
  return x;
}

// An address that converts to a pointer to anything.
struct Address {
  void* data;

  template <typename T>
  operator T*() const {
    return static_cast<T*>(data);
  }
};

// The arrays of a call except its operands. The arrays of other passes are null.
struct OtherArrays {
  ForwardResults forward = {};
  Cotangents cotangents = {};
  BackwardResults gradients = {};
  Tangents tangents = {};
  TangentResults tangent_results = {};
};

// The parameters of all kernels of a call.
TangentParams ParamsOf(const Problem& p, const Operands& in, const OtherArrays& others, const Scratch& layout,
                       void* scratch) {
  const auto& [forward, cotangents, gradients, tangents, tangent_results] = others;
  const auto at = [&](int64_t offset) { return Address{offset < 0 ? nullptr : static_cast<char*>(scratch) + offset}; };
  const bool made = layout.blocks >= 0;  // is the block mask computed from a mask operand?
  const Problem blocks_p = made ? WithMaskInBlocks(p) : p;
  const Operands blocks_in = made ? WithMaskInBlocks(in, layout, static_cast<char*>(scratch)) : in;
#define VALUE(type, name, ...) __VA_ARGS__,
  const auto block_mask = [&](const Problem& p, const Operands& in) -> BlockMask {
    return {JAX_FLASH_BLOCK_MASK(VALUE)};
  };
  ProgramParams params = {{JAX_FLASH_PARAMS(VALUE)}, in.program_batch, in.program_head, {}, {}};
  for (int i = 0; i < kMaxCaptured; ++i) {
    params.captured[i] = in.captured[i];
    params.dcaptured[i] = static_cast<float*>(gradients.captured[i]);
  }
  return {{params, JAX_FLASH_SINK_PARAMS(VALUE)}, JAX_FLASH_TANGENT_PARAMS(VALUE)};
#undef VALUE
}

// --- Execution ---

void Zero(void* array, int64_t bytes, void* stream) {
  if (!array || bytes == 0) return;
  Check(CudaDriver().cuMemsetD8Async(reinterpret_cast<uint64_t>(array), 0, bytes, stream), "cuMemsetD8Async");
}

void Run(const Problem& p, const Loaded& loaded, void* stream, TangentParams& params) {
  for (const LoadedLaunch& launch : loaded.launches) {
    ForwardMaps forward;
    BackwardMaps backward;
    BackwardBiasMaps backward_bias;
    TangentMaps tangent;
    void* arguments[1 + sizeof(BackwardMaps) / sizeof(TensorMap)] = {&params};
    void** next = arguments + 1;
    if (launch.maps == Maps::kForward) {
      forward = ForwardMapsOf(p, params, launch.tiling);
#define ARGUMENT(name) *next++ = &forward.name;
      JAX_FLASH_FORWARD_MAPS(ARGUMENT)
#undef ARGUMENT
    }
    if (launch.maps == Maps::kBackward) {
      backward = BackwardMapsOf(p, params, launch.tiling);
#define ARGUMENT(name) *next++ = &backward.name;
      JAX_FLASH_BACKWARD_MAPS(ARGUMENT)
#undef ARGUMENT
    }
    if (launch.maps == Maps::kBackwardBias) {
      backward_bias = BackwardBiasMapsOf(p, params, launch.tiling);
#define ARGUMENT(name) *next++ = &backward_bias.name;
      JAX_FLASH_BACKWARD_BIAS_MAPS(ARGUMENT)
#undef ARGUMENT
    }
    if (launch.maps == Maps::kTangent) {
      tangent = TangentMapsOf(p, params, launch.tiling);
#define ARGUMENT(name) *next++ = &tangent.name;
      JAX_FLASH_TANGENT_MAPS(ARGUMENT)
#undef ARGUMENT
    }
    Zero(params.tile_counter, launch.zero_bytes, stream);
    Check(CudaDriver().cuLaunchKernel(launch.function, launch.blocks, 1, 1, launch.threads, 1, 1, launch.shared_bytes,
                                      stream, arguments, nullptr),
          "cuLaunchKernel");
  }
}

// Kernels access 16 bytes at a time. XLA's own buffers are aligned to that.
void CheckAligned(std::initializer_list<const void*> arrays) {
  for (const void* array : arrays) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0) {
      throw std::invalid_argument("a buffer does not start at a multiple of 16 bytes");
    }
  }
}

// The results of the forward among the operands of another pass. Params has them as the forward needs them, writable.
template <typename Given>
ForwardResults ForwardOf(const Given& given) {
#define WRITABLE(type, name, ...) const_cast<void*>(given.name),
  return {JAX_FLASH_FORWARD_RESULTS(WRITABLE)};
#undef WRITABLE
}

void ExecuteForward(const Problem& p, const Loaded& loaded, void* stream, Buffers& buffers) {
  const Operands operands = buffers.TakeOperands();
  const ForwardResults results = buffers.TakeForwardResults();
  void* const scratch = buffers.TakeScratch(loaded.scratch.bytes);
  const std::string error = buffers.Error();
  if (!error.empty()) throw std::invalid_argument(error);
  if (NothingToCompute(p)) {
    const int64_t rows = p.elements("BTN", ExtentOf(true));
    Zero(results.o, p.elements("BTNE", ExtentOf(true)) * BytesOf(p.output_dtype()), stream);
    Zero(results.l, rows * 4, stream);
    if (rows == 0) return;
    constexpr unsigned kMinusInfinity = 0xFF800000u;
    Check(CudaDriver().cuMemsetD32Async(reinterpret_cast<uint64_t>(results.m), kMinusInfinity, rows, stream),
          "cuMemsetD32Async");
    return;
  }
  CheckAligned({operands.query, operands.key, operands.value, operands.key_pages, operands.value_pages, operands.bias,
                operands.mask, results.o, scratch});
  TangentParams params = ParamsOf(p, operands, {results}, loaded.scratch, scratch);
  Run(p, loaded, stream, params);
}

void ExecuteBackward(const Problem& p, const Loaded& loaded, void* stream, Buffers& buffers) {
  const Operands operands = buffers.TakeOperands();
  const Cotangents given = buffers.TakeCotangents();
  const BackwardResults results = buffers.TakeBackwardResults(p.dbias_dtype());
  void* const scratch = buffers.TakeScratch(loaded.scratch.bytes);
  const std::string error = buffers.Error();
  if (!error.empty()) throw std::invalid_argument(error);
  for (size_t i = 0; i < p.captured.size(); ++i) {
    const Captured& array = p.captured[i];
    if (array.gradient) Zero(results.captured[i], (array.batch ? p.batch : 1) * array.size() * 4, stream);
  }
  if (NothingToCompute(p)) {
    const DType dbias_dtype = p.dbias_dtype();
#define ZERO(operand, gradient, role, dtype, tangent_dtype)                                                       \
  Zero(results.gradient,                                                                                          \
       p.elements(GradientDims(role, operands::operand::kDims), GradientExtent(role, operands::operand::Of(p))) * \
           BytesOf(dtype),                                                                                        \
       stream);
    JAX_FLASH_DERIVATIVES(ZERO)
#undef ZERO
    return;
  }
  CheckAligned({operands.query, operands.key, operands.value, operands.bias, operands.mask, given.o, given.d_o,
                results.dq, results.dk, results.dv, results.dbias, scratch});
  TangentParams params = ParamsOf(p, operands, {ForwardOf(given), given, results}, loaded.scratch, scratch);
  Run(p, loaded, stream, params);
}

void ExecuteTangent(const Problem& p, const Loaded& loaded, void* stream, Buffers& buffers) {
  const Operands operands = buffers.TakeOperands();
  const Tangents given = buffers.TakeTangents();
  const TangentResults results = buffers.TakeTangentResults();
  void* const scratch = buffers.TakeScratch(loaded.scratch.bytes);
  const std::string error = buffers.Error();
  if (!error.empty()) throw std::invalid_argument(error);
  if (NothingToCompute(p)) {
    Zero(results.o_tangent, p.elements("BTNE", ExtentOf(true)) * BytesOf(p.output_dtype()), stream);
    if (p.l_tangent) Zero(results.l_tangent, p.elements("BTN", ExtentOf(true)) * 4, stream);
    return;
  }
  CheckAligned({operands.query, operands.key, operands.value, operands.bias, operands.mask, given.o,
                given.query_tangent, given.key_tangent, given.value_tangent, given.bias_tangent, results.o_tangent,
                scratch});
  TangentParams params = ParamsOf(p, operands, {ForwardOf(given), {}, {}, given, results}, loaded.scratch, scratch);
  Run(p, loaded, stream, params);
}

// --- Handlers ---

// Calls the function, and converts exceptions into errors.
template <typename Function>
ffi::Error Guarded(Pass pass, Function function) try {
  function();
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(NameOf(pass)) + ": out of memory");
} catch (const std::invalid_argument& e) {
  return ffi::Error::InvalidArgument(std::string(NameOf(pass)) + ": " + e.what());
} catch (const std::exception& e) {
  return ffi::Error::Internal(std::string(NameOf(pass)) + ": " + e.what());
}

template <Pass pass>
ffi::Error Instantiate(std::string_view text) {
  return Guarded(pass, [&] { CallOf(pass, text).Compile(); });
}

template <Pass pass>
ffi::Error Initialize(int32_t device, std::string_view text) {
  return Guarded(pass, [&] { CallOf(pass, text).Load(device); });
}

template <Pass pass>
ffi::Error Execute(void* stream, int32_t device, std::string_view text, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  return Guarded(pass, [&] {
    const Call& call = CallOf(pass, text);
    const Loaded* const loaded = call.LoadedOn(device);
    if (!loaded) throw std::runtime_error("executed before it was initialized");
    Buffers buffers(call.p, args, rets);
    constexpr auto kExecute = pass == Pass::kForward    ? ExecuteForward
                              : pass == Pass::kBackward ? ExecuteBackward
                                                        : ExecuteTangent;
    kExecute(call.p, *loaded, stream, buffers);
  });
}

template <ffi::ExecutionStage stage>
auto Stage() {
  return ffi::Ffi::Bind<stage>();
}

auto InstantiateSignature() { return Stage<ffi::ExecutionStage::kInstantiate>().Attr<std::string_view>("problem"); }
auto InitializeSignature() {
  return Stage<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>().Attr<std::string_view>("problem");
}
auto ExecuteSignature() {
  return Stage<ffi::ExecutionStage::kExecute>()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attr<std::string_view>("problem")
      .RemainingArgs()
      .RemainingRets();
}

XLA_FFI_DEFINE_HANDLER(kForwardInstantiate, Instantiate<Pass::kForward>, InstantiateSignature());
XLA_FFI_DEFINE_HANDLER(kForwardInitialize, Initialize<Pass::kForward>, InitializeSignature());
XLA_FFI_DEFINE_HANDLER(kForwardExecute, Execute<Pass::kForward>, ExecuteSignature(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBackwardInstantiate, Instantiate<Pass::kBackward>, InstantiateSignature());
XLA_FFI_DEFINE_HANDLER(kBackwardInitialize, Initialize<Pass::kBackward>, InitializeSignature());
XLA_FFI_DEFINE_HANDLER(kBackwardExecute, Execute<Pass::kBackward>, ExecuteSignature(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kTangentInstantiate, Instantiate<Pass::kTangent>, InstantiateSignature());
XLA_FFI_DEFINE_HANDLER(kTangentInitialize, Initialize<Pass::kTangent>, InitializeSignature());
XLA_FFI_DEFINE_HANDLER(kTangentExecute, Execute<Pass::kTangent>, ExecuteSignature(),
                       {ffi::Traits::kCmdBufferCompatible});

void* Pointer(XLA_FFI_Handler* handler) { return reinterpret_cast<void*>(handler); }

}  // namespace

CudaHandlers CudaForwardHandlers() {
  return {Pointer(kForwardInstantiate), Pointer(kForwardInitialize), Pointer(kForwardExecute)};
}

CudaHandlers CudaBackwardHandlers() {
  return {Pointer(kBackwardInstantiate), Pointer(kBackwardInitialize), Pointer(kBackwardExecute)};
}

CudaHandlers CudaTangentHandlers() {
  return {Pointer(kTangentInstantiate), Pointer(kTangentInitialize), Pointer(kTangentExecute)};
}

}  // namespace jax_flash
