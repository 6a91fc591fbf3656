// What is added up in dbias. For a tile of dbias, of kTiling.rows rows and kTiling.cols columns, these are the same
// tiles of S of all batch entries and heads that the bias is broadcast over. A CTA has a tile of dbias at a time. Where
// few tiles have much to add up it has one of p.parts parts of the sum, and a kernel adds up the parts.
#pragma once

#include "config.cuh"
#include "ptx/types.cuh"

namespace jax_flash {

// One dimension of [batch, head, row tile, column tile]: whether dbias has it.
struct Dimension {
  int count;
  bool own;

  __device__ __forceinline__ int Own() const { return own ? count : 1; }
  __device__ __forceinline__ int Summed() const { return own ? 1 : count; }
};

struct Shape {
  Dimension batch, head, row, column;

  __device__ __forceinline__ Shape(const Params& p)
      : batch{p.batch, p.bias.batch != 0},
        head{p.q_heads, p.bias.head != 0},
        row{(p.q_len + kTiling.rows - 1) / kTiling.rows, p.bias.row != 0},
        column{(p.kv_len + kTiling.cols - 1) / kTiling.cols, p.bias.column != 0} {}

  __device__ __forceinline__ int64_t Elements(const Params& p) const {
    return int64_t(batch.Own()) * head.Own() * (row.own ? p.q_len : 1) * (column.own ? p.kv_len : 1);
  }
};

// A bias of 16 bits has a gradient of 16 bits, which is rounded as it is written.
constexpr DType kDBiasDType = BytesOf(kProblem.bias_dtype) == 2 ? kProblem.bias_dtype : DType::kF32;

// Where sums are written: to dbias, or to one of the parts of it.
struct Sums {
  const Params& p;
  float* to;  // the part; if null, dbias itself

  __device__ __forceinline__ Sums(const Params& p, int part)
      : p(p), to(p.parts == 1 ? nullptr : p.dbias_parts + part * Shape(p).Elements(p)) {}

  __device__ __forceinline__ void Store(int64_t element, float x) const {
    if (to) {
      to[element] = x;
    } else {
      jax_flash::Store<kDBiasDType>(p.dbias, element, x);
    }
  }
};

// Takes the index within one dimension off a number that indexes several.
__device__ __forceinline__ int Take(int64_t* number, int count) {
  const int index = *number % count;
  *number /= count;
  return index;
}

// Adds up the parts of dbias: a thread for each of its elements, in blocks of kRowThreads threads.
extern "C" __global__ void jax_flash_backward_bias_finish(const __grid_constant__ Params p) {
  const int64_t elements = Shape(p).Elements(p), i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= elements) return;
  float total = 0.0f;
  for (int part = 0; part < p.parts; ++part) total += p.dbias_parts[part * elements + i];
  Store<kDBiasDType>(p.dbias, i, total);
}

}  // namespace jax_flash
