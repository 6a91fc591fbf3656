// Tiles of a bias, which TMA loads with K in the forward and with Q in the backward, and tiles of dbias, which TMA
// stores. So no thread waits for single entries. In shared memory they are swizzled boxes with all rows of a tile and
// kBoxBytes of keys.
#pragma once

#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "semantics/score.cuh"
#include "semantics/view.cuh"

namespace jax_flash::hopper {

constexpr bool kBiasTiles = kTiling.bias_tiles;
// Are scores formed entry by entry? A score_mod is applied so, and a bias that is not loaded in tiles.
constexpr bool kScoresByEntry = kScoreMod || (kBias && !kBiasTiles);
constexpr int kBiasBytes = kBiasDType == DType::kF32 ? 4 : 2;  // bytes of an entry
constexpr int kBiasBoxKeys = kBoxBytes / kBiasBytes;
constexpr int kBiasBoxes = kBiasTiles ? kTiling.cols / kBiasBoxKeys : 0;
constexpr int kBiasBox = kTiling.rows * kBoxBytes;  // bytes of a box
constexpr int kBiasTile = kBiasBoxes * kBiasBox;    // bytes of a tile
static_assert(!kBiasTiles || (kBias && kTiling.cols % kBiasBoxKeys == 0));

// Starts to load the tile at (row, key). `barrier` already expects its bytes.
__device__ __forceinline__ void LoadBiasTile(const Params& p, uint8_t* to, const TensorMap* map, uint64_t* barrier,
                                             int row, int key, int head, int batch) {
  for (int b = 0; b < kBiasBoxes; ++b) {
    TmaLoad(to + b * kBiasBox, map, barrier, key + b * kBiasBoxKeys, row, p.bias.head != 0 ? head : 0,
            p.bias.batch != 0 ? batch : 0);
  }
}

// Prefetches the tile to L2.
__device__ __forceinline__ void PrefetchBiasTile(const Params& p, const TensorMap* map, int row, int key, int head,
                                                 int batch) {
  for (int b = 0; b < kBiasBoxes; ++b) {
    TmaPrefetch(map, key + b * kBiasBoxKeys, row, p.bias.head != 0 ? head : 0, p.bias.batch != 0 ? batch : 0);
  }
}

// Starts to store the tile of dbias that has replaced the bias.
__device__ __forceinline__ void StoreBiasTile(const uint8_t* from, const TensorMap* map, int row, int key, int head,
                                              int batch) {
  for (int b = 0; b < kBiasBoxes; ++b) TmaStore(map, from + b * kBiasBox, key + b * kBiasBoxKeys, row, head, batch);
}

// Two 16-bit entries as floats, and the inverse.
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

__device__ __forceinline__ uint32_t PackBias(float low, float high) {
  uint32_t packed;
  if constexpr (kBiasDType == DType::kF16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Addresses of 16 x 16 entries of a tile. A lane has 8 of them, in the order of an accumulator. `rows` is the first of
// the 16 rows in the first box. `key` is the first of the 16 keys in the tile.
template <bool kTransposed>
struct BiasAddresses {
  const uint8_t* const box;
  const int chunk;  // the first 16 bytes in the box
  const int lane;

  __device__ __forceinline__ BiasAddresses(const uint8_t* rows, int key)
      : box(rows + key / kBiasBoxKeys * kBiasBox),
        chunk(key % kBiasBoxKeys * kBiasBytes / 16),
        lane(threadIdx.x % 32) {}

  // For 16-bit entries: a matrix has 8 x 8 entries, and each lane passes the address of a row of one matrix.
  __device__ __forceinline__ uint32_t Matrices() const {
    const int row = kTransposed ? lane / 16 * 8 + lane % 8 : lane % 16;
    const int c = chunk + (kTransposed ? lane / 8 % 2 : lane / 16);
    return SharedAddress(box + row * kBoxBytes + (c ^ row % 8) * 16);
  }

  // For 32-bit entries: the address of a lane's i-th entry. Entry i + 1 follows in memory, unless kTransposed.
  __device__ __forceinline__ float* Entry(int i) const {
    const View<kTransposed> view = {kTransposed ? lane % 4 * 2 : lane / 4, kTransposed ? lane / 4 : lane % 4 * 2};
    const int h = i / 2 % 2, x = i / 4 * 2 + i % 2, r = view.Row(h, x), k = view.Key(h, x);
    const int from = r * kBoxBytes + ((chunk + k / 4) ^ r % 8) * 16 + k % 4 * 4;
    return reinterpret_cast<float*>(const_cast<uint8_t*>(box) + from);
  }
};

// Adds 16 x 16 entries of the bias to this lane's part of S, or of its transpose.
template <bool kTransposed>
__device__ __forceinline__ void AddBiasTile(const uint8_t* rows, int key, float* S) {
  const BiasAddresses<kTransposed> addresses(rows, key);
  if constexpr (kBiasBytes == 2) {
    const uint32_t from = addresses.Matrices();
    uint32_t x[4];
    if constexpr (kTransposed) {
      LdmatrixTransposed(x, from);
    } else {
      Ldmatrix(x, from);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias = UnpackBias(x[i]);
      S[2 * i] = WithBias(S[2 * i], bias.x), S[2 * i + 1] = WithBias(S[2 * i + 1], bias.y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      if constexpr (kTransposed) {
        S[i] = WithBias(S[i], *addresses.Entry(i)), S[i + 1] = WithBias(S[i + 1], *addresses.Entry(i + 1));
      } else {  // lanes of odd rows read the two entries in reverse order, to avoid bank conflicts
        const int odd = addresses.lane / 4 % 2;
        const float first = addresses.Entry(i)[odd], second = addresses.Entry(i)[1 - odd];
        S[i] = WithBias(S[i], odd ? second : first), S[i + 1] = WithBias(S[i + 1], odd ? first : second);
      }
    }
  }
}

// Stores this lane's part of 16 x 16 entries.
__device__ __forceinline__ void PutBiasTile(uint8_t* rows, int key, const float* x) {
  const BiasAddresses<false> addresses(rows, key);
  if constexpr (kBiasBytes == 2) {
    Stmatrix(addresses.Matrices(), PackBias(x[0], x[1]), PackBias(x[2], x[3]), PackBias(x[4], x[5]),
             PackBias(x[6], x[7]));
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 2) *reinterpret_cast<float2*>(addresses.Entry(i)) = {x[i], x[i + 1]};
  }
}

}  // namespace jax_flash::hopper
