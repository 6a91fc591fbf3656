// Element types, as host and device code name them.
#pragma once

namespace jax_flash {

enum class DType : int { kNone, kF16, kBF16, kF32, kF64 };

}  // namespace jax_flash
