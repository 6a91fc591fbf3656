// Views of one head of the operands and results in HBM.
#pragma once

#include "ampere/fragments.cuh"
#include "semantics/softmax.cuh"

namespace jax_flash::ampere {

// One head of a [batch, time, head, dim] array in HBM, with elements of kBytes.
template <int kBytes>
struct MatrixOf {
  uint8_t* data;
  int64_t stride;  // bytes between rows

  __device__ __forceinline__ MatrixOf(const void* array, int batch, int head, int length, int heads, int dim)
      : data(static_cast<uint8_t*>(const_cast<void*>(array)) + (int64_t(batch) * length * heads + head) * dim * kBytes),
        stride(int64_t(heads) * dim * kBytes) {}

  __device__ __forceinline__ uint8_t* At(int row, int column) const { return data + row * stride + column * kBytes; }
};
using Matrix = MatrixOf<kElementBytes>;
using OutputMatrix = MatrixOf<kOutputBytes>;  // O and dQ

// The non-empty rows of Q and dO. Empty rows are loaded as zeros, because 0 times their content may be NaN.
struct NonEmptyRows {
  const Params& p;
  int64_t first;  // row 0 of the head in [batch, head, row]

  __device__ __forceinline__ NonEmptyRows(const Params& p, int batch, int head)
      : p(p), first((int64_t(batch) * p.q_heads + head) * p.q_len) {}
  __device__ __forceinline__ bool operator()(int row) const { return !IsEmpty(p, first + row); }
};

// Stores two consecutive elements of kBytes.
template <int kBytes>
__device__ __forceinline__ void StorePair(uint8_t* to, float a, float b) {
  if constexpr (kBytes == 4) {
    *reinterpret_cast<float2*>(to) = make_float2(a, b);
  } else {
    *reinterpret_cast<uint32_t*>(to) = Pack(a, b);
  }
}

template <int kBytes>
__device__ __forceinline__ float2 LoadPair(const uint8_t* from) {
  if constexpr (kBytes == 4) {
    return *reinterpret_cast<const float2*>(from);
  } else {
    return Unpack(*reinterpret_cast<const uint32_t*>(from));
  }
}

// Loads and stores eight aligned elements of kBytes.
template <int kBytes>
__device__ __forceinline__ void LoadEight(const uint8_t* from, float (&x)[8]) {
  if constexpr (kBytes == 4) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 y = reinterpret_cast<const float4*>(from)[i / 4];
      x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    }
  } else {
    const uint4 packed = *reinterpret_cast<const uint4*>(from);
    const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 y = Unpack(pairs[i]);
      x[2 * i] = y.x, x[2 * i + 1] = y.y;
    }
  }
}
template <int kBytes>
__device__ __forceinline__ void StoreEight(uint8_t* to, const float (&x)[8]) {
  if constexpr (kBytes == 4) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else {
    *reinterpret_cast<uint4*>(to) = make_uint4(Pack(x[0], x[1]), Pack(x[2], x[3]), Pack(x[4], x[5]), Pack(x[6], x[7]));
  }
}

}  // namespace jax_flash::ampere
