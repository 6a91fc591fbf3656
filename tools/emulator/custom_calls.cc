// Custom calls for platform cpu. They call the project's handlers for CUDA, one stage after the other, with arrays that
// are surrounded by inaccessible pages.
#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "machine.h"
#include "xla/ffi/api/c_api.h"

namespace emulator {
namespace {

constexpr size_t kPage = 4096;

// A copy of an array between inaccessible pages. It ends, up to 16 bytes, at the end of a page.
struct Guarded {
  void* original;
  size_t bytes;
  bool result;
  uint8_t *pages, *data;
  size_t mapped;

  Guarded(void* original, size_t bytes, bool result) : original(original), bytes(bytes), result(result) {
    const size_t aligned = (bytes + 15) / 16 * 16, inner = (aligned + kPage - 1) / kPage * kPage;
    mapped = inner + 2 * kPage;
    pages = static_cast<uint8_t*>(mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (inner > 0) mprotect(pages + kPage, inner, PROT_READ | PROT_WRITE);
    data = pages + kPage + inner - aligned;
    std::memset(pages + kPage, 0xFF, inner);  // NaN
    if (!result && bytes > 0) std::memcpy(data, original, bytes);
  }
  ~Guarded() {
    if (result && bytes > 0) std::memcpy(original, data, bytes);
    munmap(pages, mapped);
  }
  Guarded(const Guarded&) = delete;
};

std::mutex mutex;  // one call runs at a time
std::deque<Guarded> arrays;

size_t BytesOf(const XLA_FFI_Buffer& buffer) {
  size_t bytes = 0;
  switch (buffer.dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_S8:
      bytes = 1;
      break;
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      bytes = 2;
      break;
    case XLA_FFI_DataType_F64:
      bytes = 8;
      break;
    default:
      bytes = 4;
  }
  for (int64_t i = 0; i < buffer.rank; ++i) bytes *= buffer.dims[i];
  return bytes;
}

// The arguments or results of a call with their data in guarded memory.
struct GuardedBuffers {
  std::deque<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;

  GuardedBuffers(void** given, int64_t count, bool results) {
    for (int64_t i = 0; i < count; ++i) {
      buffers.push_back(*static_cast<XLA_FFI_Buffer*>(given[i]));
      XLA_FFI_Buffer& buffer = buffers.back();
      arrays.emplace_back(buffer.data, BytesOf(buffer), results);
      buffer.data = arrays.back().data;
      pointers.push_back(&buffer);
    }
  }
};

XLA_FFI_Handler* handlers[3][3];  // forward, backward, tangent; instantiate, initialize, execute

XLA_FFI_Error* Handle(int pass, XLA_FFI_CallFrame* frame) {
  if (frame->extension_start) return handlers[pass][2](frame);  // a query of the version
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = nullptr;
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
    args->device_ordinal = 0;
    return nullptr;
  };
  XLA_FFI_CallFrame before = *frame;
  before.api = &api;
  before.args.size = before.rets.size = 0;
  before.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  if (XLA_FFI_Error* const error = handlers[pass][0](&before)) return error;
  before.stage = XLA_FFI_ExecutionStage_INITIALIZE;
  if (XLA_FFI_Error* const error = handlers[pass][1](&before)) return error;

  const std::lock_guard<std::mutex> lock(mutex);
  GuardedBuffers args(frame->args.args, frame->args.size, false), rets(frame->rets.rets, frame->rets.size, true);
  XLA_FFI_CallFrame execute = *frame;
  execute.api = &api;
  execute.args.args = args.pointers.data(), execute.rets.rets = rets.pointers.data();
  XLA_FFI_Error* const error = handlers[pass][2](&execute);
  arrays.clear();
  return error;
}

}  // namespace

std::string DescribeAddress(const void* address) {
  const uint8_t* const at = static_cast<const uint8_t*>(address);
  for (size_t i = 0; i < arrays.size(); ++i) {
    const Guarded& x = arrays[i];
    if (x.pages > at || at >= x.pages + x.mapped) continue;
    return "byte " + std::to_string(at - x.data) + " of the " + std::to_string(x.bytes) + " of array " +
           std::to_string(i) + " of the call (arguments, then results)";
  }
  char text[64];
  std::snprintf(text, sizeof text, "address %p, which is no array's", address);
  return text;
}

}  // namespace emulator

extern "C" {

void EmulatorSetHandler(int pass, int stage, void* handler) {
  emulator::handlers[pass][stage] = reinterpret_cast<XLA_FFI_Handler*>(handler);
}

XLA_FFI_Error* EmulatedForward(XLA_FFI_CallFrame* frame) { return emulator::Handle(0, frame); }
XLA_FFI_Error* EmulatedBackward(XLA_FFI_CallFrame* frame) { return emulator::Handle(1, frame); }
XLA_FFI_Error* EmulatedTangent(XLA_FFI_CallFrame* frame) { return emulator::Handle(2, frame); }

}  // extern "C"
