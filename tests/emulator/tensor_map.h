// What the emulated driver puts into a tensor map: [d, time, head, batch] of 16-bit elements, boxes of [rows][64].
#pragma once

#include <cstdint>

namespace emulator {

struct TensorMap {
  uint8_t* data;
  uint64_t sizes[4], strides[4];  // strides in bytes
  uint32_t rows;                  // of a box
};
static_assert(sizeof(TensorMap) <= 128);

constexpr int kBoxColumns = 64, kElementBytes = 2;

}  // namespace emulator
