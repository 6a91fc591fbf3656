// What the emulated driver puts into a tensor map: [d, time, head, batch], boxes of rows of 128 bytes.
#pragma once

#include <cstdint>

namespace emulator {

struct TensorMap {
  uint8_t* data;
  uint64_t sizes[4], strides[4];  // strides in bytes
  uint32_t rows;                  // of a box
  int element_bytes;
  bool to_tf32;  // rounds what it loads
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emulator
