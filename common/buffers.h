// The buffers of the three custom calls, checked against the problem, for every platform.
#pragma once

#include <array>
#include <string>

#include "common/arrays.h"
#include "common/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// The shape of a buffer, on the stack.
class Dims {
 public:
  void Add(int64_t size) { sizes_[rank_++] = size; }
  xla::ffi::Span<const int64_t> span() const { return {sizes_.data(), rank_}; }

 private:
  size_t rank_ = 0;
  std::array<int64_t, 4> sizes_ = {};
};

// Takes the buffers of a call in order. Error reports the first invalid one.
class Buffers {
 public:
  Buffers(const Problem& problem, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets)
      : p_(problem), args_(args), rets_(rets) {}

  // The operands that all custom calls start with.
  Operands TakeOperands();
  ForwardResults TakeForwardResults();
  Cotangents TakeCotangents();
  BackwardResults TakeBackwardResults(DType dbias_dtype);
  Tangents TakeTangents();
  TangentResults TakeTangentResults();
  // The last result of a call on a GPU, with at least this many bytes. If it is 0, the result may be absent.
  void* TakeScratch(int64_t bytes);

  // The error after all buffers have been taken; empty if they are valid.
  std::string Error() const;

 private:
  // `dims` has one letter for each dimension.
  const void* Operand(const char* name, xla::ffi::DataType dtype, const char* dims, const Extent& extent);
  void* Result(const char* name, DType dtype, const char* dims, const Extent& extent);
  const void* Operand(const std::string& name, xla::ffi::DataType dtype, const Dims& dims);
  void* Result(const std::string& name, DType dtype, const Dims& dims);
  void* Checked(const std::string& name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype, const Dims& dims);
  Dims DimsOf(const char* letters, const Extent& extent) const;
  Dims DimsOf(const Captured& captured) const;

  const Problem& p_;
  xla::ffi::RemainingArgs args_;
  xla::ffi::RemainingRets rets_;
  size_t args_taken_ = 0, rets_taken_ = 0;
  std::string error_;
};

}  // namespace jax_flash
