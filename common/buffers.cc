#include "common/buffers.h"

#include <algorithm>

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
    case ffi::U8:
      text = "u8";
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

}  // namespace

const void* Buffers::Operand(const char* name, bool present, ffi::DataType dtype, const Dims& dims) {
  if (!present || !error_.empty()) return nullptr;
  auto buffer = args_.get<ffi::AnyBuffer>(args_taken_++);
  if (!buffer) {
    error_ = "operand " + std::string(name) + " is missing";
    return nullptr;
  }
  return Checked("operand ", name, *buffer, dtype, dims);
}

void* Buffers::Result(const char* name, bool present, ffi::DataType dtype, const Dims& dims) {
  if (!present || !error_.empty()) return nullptr;
  auto buffer = rets_.get<ffi::AnyBuffer>(rets_taken_++);
  if (!buffer) {
    error_ = "result " + std::string(name) + " is missing";
    return nullptr;
  }
  return Checked("result ", name, **buffer, dtype, dims);
}

void* Buffers::Checked(const char* kind, const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                       const Dims& dims) {
  const ffi::Span<const int64_t> actual = buffer.dimensions(), expected = dims.span();
  if (buffer.element_type() == dtype && std::equal(actual.begin(), actual.end(), expected.begin(), expected.end())) {
    return buffer.untyped_data();
  }
  error_ = std::string(kind) + name + " is " + Text(buffer.element_type(), actual) + ", the problem says " +
           Text(dtype, expected);
  return nullptr;
}

Dims Buffers::Shape(const Extent& extent) const {
  return {extent.batch ? p_.batch : 1, extent.heads ? p_.q_heads : 1, extent.rows ? p_.q_len : 1,
          extent.columns ? p_.kv_len : 1};
}

ffi::DataType Buffers::StatisticsType() const { return p_.dtype == DType::kF64 ? ffi::F64 : ffi::F32; }

Operands Buffers::TakeOperands() {
  const ffi::DataType dtype = XlaType(p_.dtype);
  Operands in;
  in.query = Operand("query", true, dtype, {p_.batch, p_.q_len, p_.q_heads, p_.qk_dim});
  in.key = Operand("key", true, dtype, {p_.batch, p_.kv_len, p_.kv_heads, p_.qk_dim});
  in.value = Operand("value", true, dtype, {p_.batch, p_.kv_len, p_.kv_heads, p_.v_dim});
  in.scale = Operand("scale", true, StatisticsType(), {});
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
  const auto words = [&](const char* name, bool present, const Dims& dims) {
    return static_cast<const uint32_t*>(Operand(name, present, ffi::U32, dims));
  };
  if (const Extent& mask = p_.block_mask; mask.present) {
    const int64_t batch = mask.batch ? p_.batch : 1, heads = mask.heads ? p_.q_heads : 1;
    const int64_t rows = p_.block_rows(), columns = p_.block_columns();
    in.blocks = integers("blocks", true, {batch, heads, rows, columns});
    in.row_lists = integers("row_lists", true, {batch, heads, rows, p_.row_list});
    in.column_lists = integers("column_lists", true, {batch, heads, columns, p_.column_list});
    in.element_masks =
        words("element_masks", p_.element_masks > 0, {batch, p_.element_masks, p_.q_block, p_.element_words()});
  }
  in.seed = words("seed", p_.dropout(), {p_.batch, 2});
  in.batch_id = words("batch_id", p_.dropout(), {p_.batch});
  in.head_id = words("head_id", p_.dropout(), {p_.q_heads});
  return in;
}

ForwardResults Buffers::TakeForwardResults() {
  const Dims statistics = {p_.batch, p_.q_heads, p_.q_len};
  ForwardResults results;
  results.o = Result("o", true, XlaType(p_.dtype), {p_.batch, p_.q_len, p_.q_heads, p_.v_dim});
  results.l = Result("l", true, StatisticsType(), statistics);
  results.m = Result("m", true, StatisticsType(), statistics);
  return results;
}

Cotangents Buffers::TakeCotangents() {
  const ffi::DataType dtype = XlaType(p_.dtype);
  const Dims output = {p_.batch, p_.q_len, p_.q_heads, p_.v_dim}, statistics = {p_.batch, p_.q_heads, p_.q_len};
  Cotangents given;
  given.o = Operand("o", true, dtype, output);
  given.l = Operand("l", true, StatisticsType(), statistics);
  given.m = Operand("m", true, StatisticsType(), statistics);
  given.d_o = Operand("do", true, dtype, output);
  given.dlogsumexp = Operand("dlogsumexp", p_.dlogsumexp, StatisticsType(), statistics);
  return given;
}

BackwardResults Buffers::TakeBackwardResults() {
  const ffi::DataType dtype = XlaType(p_.dtype);
  BackwardResults results;
  results.dq = Result("dq", p_.dq, dtype, {p_.batch, p_.q_len, p_.q_heads, p_.qk_dim});
  results.dk = Result("dk", p_.dk, dtype, {p_.batch, p_.kv_len, p_.kv_heads, p_.qk_dim});
  results.dv = Result("dv", p_.dv, dtype, {p_.batch, p_.kv_len, p_.kv_heads, p_.v_dim});
  results.dbias = Result("dbias", p_.dbias, StatisticsType(), Shape(p_.bias));
  return results;
}

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
