// Kernel before the Ampere backward kernels: computes L and D from O, dO, l and m, and sets the f32 sums of dQ to zero.
#pragma once

#include "ampere/matrix.cuh"

namespace jax_flash::ampere {

constexpr int kRowLanes = LanesOfRow(kVDim);

// Writes D_i = dO_i O_i - dlogsumexp_i and MinusL_i as [batch, head, row], with rows padded as in p.dq_sum. It also
// writes what each row adds to other gradients. CTAs have kRowThreads threads. Each row, padding included, has
// kRowLanes of them.
extern "C" __global__ void jax_flash_backward_prepare(const __grid_constant__ RowParams p) {
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kRowLanes;  // [batch, head, row]
  const int lane = threadIdx.x % kRowLanes;
  const int row = at % PaddedRows(p), head = at / PaddedRows(p) % p.q_heads;
  const int64_t batch = at / PaddedRows(p) / p.q_heads;
  const bool exists = batch < p.batch && row < p.q_len;
  float sum = 0.0f;
#pragma unroll
  for (int first = 0; first < kVDim; first += 8 * kRowLanes) {
    const int column = first + 8 * lane;
    if (!exists || column >= kVDim) continue;
    float o[8], d_o[8];
    LoadEight<kOutputBytes>(OutputMatrix(p.o, batch, head, p.q_len, p.q_heads, kVDim).At(row, column), o);
    LoadEight<kElementBytes>(Matrix(p.d_o, batch, head, p.q_len, p.q_heads, kVDim).At(row, column), d_o);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += o[i] * d_o[i];
  }
  sum = LaneSum<kRowLanes>(sum);
  if (batch >= p.batch) return;
  if (lane == 0) {
    const int64_t from = (batch * p.q_heads + head) * p.q_len + row;
    p.logsumexp[at] = exists ? MinusLOfRow(p, batch, head, from) : -Infinity();
    if (exists) {
      const RowGradients gradients(p, batch, head, from, sum);
      sum = gradients.d;
      gradients.StoreOfSink(p, from);
    }
    p.d[at] = sum;
  }
  if (kDQ && p.dq_sum != nullptr) {
    float4* dq = reinterpret_cast<float4*>(p.dq_sum + at * kQKDim);
    for (int i = lane; i < kQKDim / 4; i += kRowLanes) dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

}  // namespace jax_flash::ampere
