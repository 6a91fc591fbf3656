// Element types, for host and device code.
#pragma once

#include "common/host_device.h"

namespace jax_flash {

enum class DType : int { kNone, kF16, kBF16, kF32, kF64 };

// The size of an element.
JAX_FLASH_STATIC_HOST_DEVICE constexpr int BytesOf(DType dtype) {
  return dtype == DType::kNone ? 0 : dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
}

}  // namespace jax_flash
