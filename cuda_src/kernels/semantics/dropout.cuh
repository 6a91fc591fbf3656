// The dropout mask Z, which `jax_flash/dropout.py` specifies. One Philox call has 16 bits for each of the eight entries
// {i, i+8} x {j, j+1, j+8, j+9}, where i % 16 < 8 and j % 16 is 0, 2, 4 or 6. One lane holds exactly these entries of a
// 16 x 16 tile of an accumulator. An entry is dropped if the lower 15 bits are below the threshold. Magnitudes of
// bfloat16 numbers compare in the same way, as long as the threshold is not NaN.
#pragma once

#include "config.cuh"
#include "ptx/types.cuh"
#include "ptx/warp.cuh"

namespace jax_flash {

constexpr bool kDropout = kProblem.dropout;

struct Philox4 {
  uint32_t x[4];
};

// Philox4x32-7 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).
__device__ __forceinline__ Philox4 Philox(Philox4 c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c.x[0];
    const uint64_t b = uint64_t(0xCD9E8D57u) * c.x[2];
    c = {{uint32_t(b >> 32) ^ c.x[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ c.x[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// The factor of the kept entries in Z.
__device__ __forceinline__ float ZScale(const Params& p) { return kDropout ? p.keep_scale : 1.0f; }

// Does dropout drop the entry with half e of a random word? For the upper half, the lower half need not be cleared,
// since it cannot change the comparison.
__device__ __forceinline__ bool Dropped(const Params& p, uint32_t word, int e) {
  return kDropout && fabsf(__uint_as_float(e == 0 ? word << 16 : word)) < __uint_as_float(p.drop_threshold << 16);
}

// The row's number in the Philox counter. Rows i and i + 8 of 16 share it.
__device__ __forceinline__ uint32_t RowCounter(uint32_t i) { return i / 16 * 8 + i % 8; }

// The counter's values for the call's first row and column. A call that computes a part of a sequence starts at
// `origin`, multiples of 16.
__device__ __forceinline__ uint32_t FirstRowCounter(const Params& p) {
  return kProblem.origin && !kProblem.dropout_tiles ? RowCounter(__ldg(p.origin)) : 0;
}
__device__ __forceinline__ uint32_t FirstColumns(const Params& p) {
  return kProblem.origin && !kProblem.dropout_tiles ? uint32_t(__ldg(p.origin + 1)) / 4 : 0;
}

// The same for one row or 16 columns of a part that consists of chunks, by the tables of its tiles. Rows and columns
// beyond T and S are clamped.
__device__ __forceinline__ uint32_t OfRow(const Params& p, uint32_t row_counter) {
  if constexpr (!kProblem.dropout_tiles) return row_counter;
  const uint32_t tile = min(row_counter / 8, uint32_t(p.q_len - 1) / 16);
  return uint32_t(__ldg(p.row_tiles + tile)) * 8 + row_counter % 8;
}
__device__ __forceinline__ uint32_t OfColumns(const Params& p, uint32_t columns) {
  if constexpr (!kProblem.dropout_tiles) return columns;
  return uint32_t(__ldg(p.key_tiles + min(columns, uint32_t(p.kv_len - 1) / 16)));
}

// The key and counter words for a batch entry and head. They are unset without dropout.
struct Seed {
  const Params& p;
  uint32_t key0, key1, head_id, batch_id, first_columns, first_row_counter;

  __device__ __forceinline__ Seed(const Params& p, int batch, int head) : p(p) {
    if constexpr (!kDropout) return;
    key0 = p.seed[2 * batch], key1 = p.seed[2 * batch + 1];
    head_id = p.head_id[head], batch_id = p.batch_id[batch];
    first_columns = FirstColumns(p), first_row_counter = FirstRowCounter(p);
  }

  // The random words of this lane for the 16 columns with index `columns`, and for one row and the row 8 after it.
  __device__ __forceinline__ Philox4 Words(uint32_t columns, uint32_t row_counter) const {
    if constexpr (!kDropout) return {};
    const uint32_t column = first_columns + OfColumns(p, columns) * 4 + threadIdx.x % 4;
    return Philox({{column, first_row_counter + OfRow(p, row_counter), head_id, batch_id}}, key0, key1);
  }
};

// Z of two rows of a lane, in a tile of S with kKeys columns. A word has two entries. Each half has all bits set if the
// entry is kept, and is 0 if it is dropped.
template <int kKeys>
struct PackedZ {
  uint32_t seed[4];  // the Philox key, and the ids of the head and the batch entry
  uint32_t kept[kKeys / 4];

  __device__ __forceinline__ void Start(const Params& p, int batch, int head) {
    if constexpr (!kDropout) return;
    seed[0] = p.seed[2 * batch], seed[1] = p.seed[2 * batch + 1];
    seed[2] = p.head_id[head], seed[3] = p.batch_id[batch];
  }

  // Generates Z for rows `row` and row + 8 of the tile that begins at `column`.
  __device__ __forceinline__ void Generate(const Params& p, uint32_t row, int column) {
    if constexpr (!kDropout) return;
    Pin(seed);  // or the compiler would compute values of all tiles ahead, and spill them
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c) {
      const uint32_t columns = FirstColumns(p) + OfColumns(p, column / 16 + c) * 4 + threadIdx.x % 4;
      const uint32_t row_counter = FirstRowCounter(p) + OfRow(p, RowCounter(row));
      const Philox4 x = Philox({{columns, row_counter, seed[2], seed[3]}}, seed[0], seed[1]);
#pragma unroll
      for (int w = 0; w < 4; ++w) kept[4 * c + w] = NotBelow(x.x[w], p.drop_threshold);
    }
    Pin(kept);
  }

  // Applies Z to P, the left operand of P V. The factor of the kept entries is applied elsewhere.
  template <int kCount>
  __device__ __forceinline__ void Apply(uint32_t (&P)[kCount]) const {
    if constexpr (!kDropout) return;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      const int c = i / 4 * 2 + i % 2, h = i / 2 % 2;
      if constexpr (kTF32) {
        P[4 * c + h] &= int32_t(kept[i] << 16) >> 16, P[4 * c + h + 2] &= int32_t(kept[i]) >> 16;
      } else {
        P[2 * c + h] &= kept[i];
      }
    }
  }
};

// From here on, a negative sign marks a dropped entry of P. The backward of the softmax needs the P of dropped entries,
// too.

// Marks dropped entries in a 16 x 16 tile of P. This lane holds C = float[8] of it, and `words`. In P^T, other lanes
// hold the words for this lane's entries, because words follow the layout of the forward. So the words are transposed.
template <bool kTransposed>
__device__ __forceinline__ void MarkZ(const Params& p, const Philox4& words, float* C) {
  if constexpr (!kDropout) return;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t x = kTransposed ? Movmatrix(words.x[w]) : words.x[w];
    float* s = kTransposed ? C + w / 2 * 4 + w % 2 * 2 : C + w % 2 * 4 + w / 2 * 2;
    if (Dropped(p, x, 0)) s[0] = -s[0];
    if (Dropped(p, x, 1)) s[1] = -s[1];
  }
}

// Packs two entries of P as an operand, with dropped entries as 0.
__device__ __forceinline__ uint32_t PackKept(float low, float high) {
  return kDropout ? PackRelu(low, high) : Pack(low, high);
}
__device__ __forceinline__ float Kept(float x) { return kDropout && x < 0.0f ? 0.0f : x; }

// dS = P (Z dP - D), with dropped entries of P marked. The factor of the kept entries is either in dP, or it is left
// out: then D has been divided by it, and the caller multiplies dS by it.
__device__ __forceinline__ float DSOf(float P, float dP, float D) {
  return kDropout ? fmaf(fmaxf(P, 0.0f), dP, -fabsf(P) * D) : P * (dP - D);
}

}  // namespace jax_flash
