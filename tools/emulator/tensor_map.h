// The emulated driver's content of a tensor map: [d, time, head, batch], with boxes of rows of 128 bytes.
#pragma once

#include <cstdint>

namespace emulator {

struct TensorMap {
  uint8_t* data;
  uint64_t sizes[4], strides[4];  // strides in bytes
  uint32_t rows;                  // of a box
  int element_bytes;
  bool to_tf32;  // loads round to TF32
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emulator
