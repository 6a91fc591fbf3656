// Element types of Q, K, V, O and their gradients in the CUDA kernels.
#pragma once

#include <stdexcept>

#include "common/dtype.h"

namespace jax_flash {

struct Element {
  int bytes;
  int map_type;     // CU_TENSOR_MAP_DATA_TYPE_* of results
  int loaded_type;  // of operands: TMA rounds float32 to TF32
};

constexpr Element ElementOf(DType dtype) {
  constexpr int kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9, kTFloat32 = 11;
  switch (dtype) {
    case DType::kF16:
      return {BytesOf(dtype), kFloat16, kFloat16};
    case DType::kBF16:
      return {BytesOf(dtype), kBfloat16, kBfloat16};
    case DType::kF32:
      return {BytesOf(dtype), kFloat32, kTFloat32};
    case DType::kF64:
    case DType::kNone:
      break;
  }
  throw std::logic_error("an element type that the CUDA kernels do not have");
}

}  // namespace jax_flash
