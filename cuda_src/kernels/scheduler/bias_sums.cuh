// The sums in dbias. A tile of dbias (kTiling.rows x kTiling.cols) is the sum of the same tile of dS over all batch
// entries and heads that share the bias. A CTA computes one tile of dbias at a time. If few tiles have long sums, each
// CTA computes one of p.parts parts of a sum, and a second kernel adds the parts.
#pragma once

#include "config.cuh"
#include "ptx/types.cuh"

namespace jax_flash {

// One dimension of [batch, head, row tile, column tile]. own: does dbias have this dimension, or is it summed over?
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

// The gradient of a 16-bit bias has 16 bits, too. Others are f32.
constexpr DType kDBiasDType = BytesOf(kProblem.bias_dtype) == 2 ? kProblem.bias_dtype : DType::kF32;

// The destination of sums: dbias, or one of its parts.
struct Sums {
  const Params& p;
  float* to;  // the part, or null for dbias

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

// Divides off the innermost index of a number that combines several indices.
__device__ __forceinline__ int PopIndex(int64_t* number, int count) {
  const int index = *number % count;
  *number /= count;
  return index;
}

// Adds the parts of dbias: one thread for each element, in CTAs of kRowThreads threads.
extern "C" __global__ void jax_flash_backward_bias_finish(const __grid_constant__ Params p) {
  const int64_t elements = Shape(p).Elements(p), i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= elements) return;
  float total = 0.0f;
  for (int part = 0; part < p.parts; ++part) total += p.dbias_parts[part * elements + i];
  Store<kDBiasDType>(p.dbias, i, total);
}

}  // namespace jax_flash
