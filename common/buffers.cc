#include "common/buffers.h"

#include <algorithm>
#include <type_traits>

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;

std::string Text(ffi::DataType dtype, ffi::Span<const int64_t> dims) {
  std::string text;
  switch (dtype) {
    case ffi::PRED:
      text = "pred";
      break;
    case ffi::S32:
      text = "s32";
      break;
    case ffi::S8:
      text = "s8";
      break;
    case ffi::S16:
      text = "s16";
      break;
    case ffi::U8:
      text = "u8";
      break;
    case ffi::U16:
      text = "u16";
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

ffi::DataType XlaType(CapturedDType dtype) {
  constexpr ffi::DataType kTypes[] = {
#define ENTRY(text, name, ...) ffi::name,
      JAX_FLASH_CAPTURED_DTYPES(ENTRY)
#undef ENTRY
  };
  return kTypes[int(dtype)];
}

// The dtype of an array of T; `dtype` if T is void.
template <typename T>
ffi::DataType TypeOf(DType dtype) {
  if (std::is_same_v<T, uint8_t>) return ffi::PRED;
  if (std::is_same_v<T, int32_t>) return ffi::S32;
  if (std::is_same_v<T, uint32_t>) return ffi::U32;
  return XlaType(dtype);
}

std::string NameOf(const char* arrays, size_t number) { return arrays + ("[" + std::to_string(number) + "]"); }

}  // namespace

Dims Buffers::DimsOf(const char* letters, const Extent& extent) const {
  Dims dims;
  for (; *letters; ++letters) dims.Add(p_.size(*letters, extent));
  return dims;
}

Dims Buffers::DimsOf(const Captured& captured) const {
  Dims dims;
  dims.Add(captured.batch ? p_.batch : 1);
  dims.Add(captured.size());
  return dims;
}

const void* Buffers::Operand(const char* name, ffi::DataType dtype, const char* dims, const Extent& extent) {
  return extent.present ? Operand(name, dtype, DimsOf(dims, extent)) : nullptr;
}

void* Buffers::Result(const char* name, DType dtype, const char* dims, const Extent& extent) {
  return extent.present ? Result(name, dtype, DimsOf(dims, extent)) : nullptr;
}

const void* Buffers::Operand(const std::string& name, ffi::DataType dtype, const Dims& dims) {
  if (!error_.empty()) return nullptr;
  auto buffer = args_.get<ffi::AnyBuffer>(args_taken_++);
  if (buffer) return Checked("operand " + name, *buffer, dtype, dims);
  error_ = "operand " + name + " is missing";
  return nullptr;
}

void* Buffers::Result(const std::string& name, DType dtype, const Dims& dims) {
  if (!error_.empty()) return nullptr;
  auto buffer = rets_.get<ffi::AnyBuffer>(rets_taken_++);
  if (buffer) return Checked("result " + name, **buffer, XlaType(dtype), dims);
  error_ = "result " + name + " is missing";
  return nullptr;
}

void* Buffers::Checked(const std::string& name, const ffi::AnyBuffer& buffer, ffi::DataType dtype, const Dims& dims) {
  const ffi::Span<const int64_t> actual = buffer.dimensions(), expected = dims.span();
  if (buffer.element_type() == dtype && std::equal(actual.begin(), actual.end(), expected.begin(), expected.end())) {
    return buffer.untyped_data();
  }
  error_ = name + " is " + Text(buffer.element_type(), actual) + ", the problem says " + Text(dtype, expected);
  return nullptr;
}

#define TAKE_OPERAND(type, name, dtype, dims, there) \
  given.name = static_cast<const type*>(Operand(#name, TypeOf<type>(dtype), dims, ExtentOf(there)));
#define TAKE_RESULT(of, name, dtype, dims, there) results.name = Result(#name, dtype, dims, ExtentOf(there));

Operands Buffers::TakeOperands() {
  const Problem& p = p_;
  Operands given;
  JAX_FLASH_OPERANDS(TAKE_OPERAND)
  for (size_t i = 0; i < p.captured.size(); ++i) {
    given.captured[i] = Operand(NameOf("captured", i), XlaType(p.captured[i].dtype), DimsOf(p.captured[i]));
  }
  return given;
}

ForwardResults Buffers::TakeForwardResults() {
  const Problem& p = p_;
  ForwardResults results;
  JAX_FLASH_FORWARD_RESULTS(TAKE_RESULT)
  return results;
}

Cotangents Buffers::TakeCotangents() {
  const Problem& p = p_;
  Cotangents given;
  JAX_FLASH_FORWARD_RESULTS(TAKE_OPERAND)
  JAX_FLASH_COTANGENTS(TAKE_OPERAND)
  return given;
}

BackwardResults Buffers::TakeBackwardResults(DType dbias_dtype) {
  const Problem& p = p_;
  BackwardResults results;
#define TAKE_GRADIENT(operand, gradient, role, dtype, tangent_dtype)                        \
  results.gradient = Result(#gradient, dtype, GradientDims(role, operands::operand::kDims), \
                            p.gradient ? GradientExtent(role, operands::operand::Of(p)) : Extent());
  JAX_FLASH_DERIVATIVES(TAKE_GRADIENT)
#undef TAKE_GRADIENT
  for (size_t i = 0; i < p.captured.size(); ++i) {
    if (!p.captured[i].gradient) continue;
    results.captured[i] = Result(NameOf("dcaptured", i), p.accumulation_dtype(), DimsOf(p.captured[i]));
  }
  return results;
}

Tangents Buffers::TakeTangents() {
  const Problem& p = p_;
  Tangents given;
  JAX_FLASH_FORWARD_RESULTS(TAKE_OPERAND)
#define TAKE_TANGENT(operand, gradient, role, dtype, tangent_dtype)              \
  TAKE_OPERAND(void, operand##_tangent, tangent_dtype, operands::operand::kDims, \
               p.operand##_tangent ? operands::operand::Of(p) : Extent())
  JAX_FLASH_DERIVATIVES(TAKE_TANGENT)
#undef TAKE_TANGENT
  return given;
}

TangentResults Buffers::TakeTangentResults() {
  const Problem& p = p_;
  TangentResults results;
  JAX_FLASH_TANGENT_RESULTS(TAKE_RESULT)
  return results;
}

#undef TAKE_OPERAND
#undef TAKE_RESULT

void* Buffers::TakeScratch(int64_t bytes) {
  if (!error_.empty() || (bytes == 0 && rets_taken_ == rets_.size())) return nullptr;
  auto buffer = rets_.get<ffi::AnyBuffer>(rets_taken_++);
  if (!buffer) {
    error_ = "result scratch is missing, of " + std::to_string(bytes) + " bytes on this GPU";
    return nullptr;
  }
  const ffi::Span<const int64_t> dims = (*buffer)->dimensions();
  if ((*buffer)->element_type() == ffi::U8 && dims.size() == 1 && dims[0] >= bytes) return (*buffer)->untyped_data();
  error_ = "result scratch is " + Text((*buffer)->element_type(), dims) + ", but this GPU needs u8[" +
           std::to_string(bytes) + "] or more: the program was compiled for another one";
  return nullptr;
}

std::string Buffers::Error() const {
  if (!error_.empty()) return error_;
  if (args_.size() != args_taken_) return "too many operands: " + std::to_string(args_.size());
  if (rets_.size() != rets_taken_) return "too many results: " + std::to_string(rets_.size());
  return "";
}

}  // namespace jax_flash
