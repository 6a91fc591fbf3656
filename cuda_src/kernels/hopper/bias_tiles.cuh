// Tiles of a bias that the copy engine brings, with K in the forward and with Q in the backward, so that nobody waits
// for its entries one by one. They lie as they come: boxes of kBoxBytes of keys, of all rows of a tile, swizzled.
#pragma once

#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "semantics/score.cuh"
#include "semantics/view.cuh"

namespace jax_flash {

constexpr bool kBiasTiles = kTiling.bias_tiles;
constexpr int kBiasBytes = kBiasDType == DType::kF32 ? 4 : 2;  // of an entry
constexpr int kBiasBoxKeys = kBoxBytes / kBiasBytes;
constexpr int kBiasBoxes = kBiasTiles ? kTiling.cols / kBiasBoxKeys : 0;
constexpr int kBiasBox = kTiling.rows * kBoxBytes;  // bytes of a box
constexpr int kBiasTile = kBiasBoxes * kBiasBox;    // of a tile
static_assert(!kBiasTiles || (kBias && kTiling.cols % kBiasBoxKeys == 0));

// Begins to load the tile at (row, key), whose bytes `barrier` has been told to expect.
__device__ __forceinline__ void LoadBiasTile(const Params& p, uint8_t* to, const TensorMap* map, uint64_t* barrier,
                                             int row, int key, int head, int batch) {
  for (int b = 0; b < kBiasBoxes; ++b) {
    TmaLoad(to + b * kBiasBox, map, barrier, key + b * kBiasBoxKeys, row, p.bias.head != 0 ? head : 0,
            p.bias.batch != 0 ? batch : 0);
  }
}

// Two entries of 16 bits.
__device__ __forceinline__ float2 UnpackBias(uint32_t packed) {
  if constexpr (kBiasDType == DType::kF16) {
    float2 x;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(packed));
    return x;
  }
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000)};
}

// Adds 16 x 16 entries to those of S, or of its transpose, of which `S` is what a lane has. `rows`: the first of the 16
// in the first box; `key`: of the tile.
template <bool kTransposed>
__device__ __forceinline__ void AddBiasTile(const uint8_t* rows, int key, float* S) {
  const int lane = threadIdx.x % 32, c = key % kBiasBoxKeys * kBiasBytes / 16;  // the first 16 bytes in the box
  const uint8_t* const box = rows + key / kBiasBoxKeys * kBiasBox;
  if constexpr (kBiasBytes == 2) {
    // A matrix for 8 x 8 entries, in the order of an accumulator. Each lane gives the address of a row of one.
    const int row = kTransposed ? lane / 16 * 8 + lane % 8 : lane % 16;
    const int chunk = c + (kTransposed ? lane / 8 % 2 : lane / 16);
    const uint32_t from = SharedAddress(box + row * kBoxBytes + (chunk ^ row % 8) * 16);
    uint32_t x[4];
    if constexpr (kTransposed) {
      LdmatrixTransposed(x, from);
    } else {
      Ldmatrix(x, from);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias = UnpackBias(x[i]);
      S[2 * i] += bias.x, S[2 * i + 1] += bias.y;
    }
  } else {
    const View<kTransposed> view = {kTransposed ? lane % 4 * 2 : lane / 4, kTransposed ? lane / 4 : lane % 4 * 2};
    const auto at = [&](int i) {
      const int h = i / 2 % 2, x = i / 4 * 2 + i % 2, r = view.Row(h, x), k = view.Key(h, x);
      return reinterpret_cast<const float*>(box + r * kBoxBytes + ((c + k / 4) ^ r % 8) * 16 + k % 4 * 4);
    };
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      if constexpr (kTransposed) {
        S[i] += *at(i), S[i + 1] += *at(i + 1);
      } else {  // two keys side by side
        const float2 bias = *reinterpret_cast<const float2*>(at(i));
        S[i] += bias.x, S[i + 1] += bias.y;
      }
    }
  }
}

}  // namespace jax_flash
