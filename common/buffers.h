// The buffers of the three custom calls as XLA hands them over, checked against the problem: the same on every
// platform.
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

// Takes the buffers of a call one after the other. The first that is not as expected ends up in the error.
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
  // The last result of a call on a GPU, which has so many bytes or more. With 0 bytes there need be none.
  void* TakeScratch(int64_t bytes);

  // What is wrong with the buffers, once all have been taken; empty if nothing is.
  std::string Error() const;

 private:
  // `dims`: a letter each.
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
