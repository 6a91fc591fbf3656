// Gradients of captured arrays in the Hopper backward. A warp sums the contributions of 16 rows and 16 keys to the same
// element before it adds the sum to HBM.
#pragma once

#include "ptx/warp.cuh"
#include "semantics/score.cuh"

namespace jax_flash::hopper::backward {

// In 16 rows and 16 keys of S^T, a lane has the entries of keys lane / 4 + 8 h and rows 8 n + lane % 4 * 2 + e. They
// have the numbers 4 n + 2 h + e.
constexpr int kEntriesOfBlock = 8;

// One sum of a block in this lane, and an entry (row, key) that contributes to it. x is 0 if another lane has the sum.
struct BlockSum {
  float x;
  int row, key;
};

// A lane and its partner have parts of two sums, a and b. Returns all of a; in the second of the two lanes, all of b.
__device__ __forceinline__ float AddOneOf(float a, float b, bool second, int partner) {
  return (second ? b : a) + __shfl_sync(0xFFFFFFFFu, second ? a : b, partner);
}

// The sums over rows: 16 of them, in the lanes whose lane / 4 is even.
__device__ __forceinline__ BlockSum SumOfRow(const float (&x)[kEntriesOfBlock], int lane) {
  float rows[2];  // for e = 0 and 1
#pragma unroll
  for (int e = 0; e < 2; ++e) rows[e] = AddOneOf(x[e] + x[2 + e], x[4 + e] + x[6 + e], lane & 16, lane ^ 16);
  const float half = AddOneOf(rows[0], rows[1], lane & 8, lane ^ 8);
  const float sum = half + __shfl_xor_sync(0xFFFFFFFFu, half, 4);
  return {lane & 4 ? 0.0f : sum, lane / 16 * 8 + lane % 4 * 2 + lane / 8 % 2, 0};
}

// The sums over keys: 16 of them, in the lanes whose lane % 4 is less than 2.
__device__ __forceinline__ BlockSum SumOfKey(const float (&x)[kEntriesOfBlock], int lane) {
  const float half = AddOneOf((x[0] + x[1]) + (x[4] + x[5]), (x[2] + x[3]) + (x[6] + x[7]), lane & 1, lane ^ 1);
  const float sum = half + __shfl_xor_sync(0xFFFFFFFFu, half, 2);
  return {lane & 2 ? 0.0f : sum, 0, lane / 4 + lane % 2 * 8};
}

// The sums over diagonals, on which row - key is constant: 31 sums, and an empty sum in one lane.
__device__ __forceinline__ BlockSum SumOfDiagonal(const float (&x)[kEntriesOfBlock], int lane) {
  const int key = lane / 4, first = lane % 4 * 2 - key;
  // This lane's partial sums. `even`, from entries with e = 0, is for the diagonals first - 8, first and first + 8.
  // `odd`, from entries with e = 1, is for the diagonals after these.
  float even[4] = {x[2], x[0] + x[6], x[4], 0.0f};
  const float odd[4] = {x[3], x[1] + x[7], x[5], 0.0f};
  // The odd sums of the next key have the same diagonals as the even sums of this key. The eighth key is followed by
  // the first, with odd sums for diagonals that are 8 lower.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float wrapped = i > 0 ? odd[i - 1] : 0.0f;
    even[i] += __shfl_sync(0xFFFFFFFFu, key == 0 ? wrapped : odd[i], (lane + 4) % 32);
  }
  // Four lanes have sums of the same diagonals, which are -16, -8, 0 and 8, plus first % 8.
  float diagonals[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) diagonals[i] = first < 0 ? even[i] : i > 0 ? even[i - 1] : 0.0f;
  float halves[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) halves[i] = AddOneOf(diagonals[i], diagonals[i + 2], lane & 16, lane ^ 18);
  const int partner = (lane ^ 8) / 4 * 4 + (lane + (lane & 8 ? 3 : 1)) % 4;
  const float sum = AddOneOf(halves[0], halves[1], lane & 8, partner);
  const int diagonal = max((first & 7) + lane / 8 * 8 - 16, -15);  // diagonal -16 does not exist; its sum is empty
  return {sum, max(diagonal, 0), max(-diagonal, 0)};
}

template <program::SumKind kSumOver>
__device__ __forceinline__ BlockSum SumOver(const float (&x)[kEntriesOfBlock], int lane) {
  if constexpr (kSumOver == program::SumKind::kRows) return SumOfRow(x, lane);
  if constexpr (kSumOver == program::SumKind::kKeys) return SumOfKey(x, lane);
  if constexpr (kSumOver == program::SumKind::kDiagonals) return SumOfDiagonal(x, lane);
  const float own = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])), sum = LaneSum<32>(own);
  return {lane == 0 ? sum : 0.0f, 0, 0};
}

// Stores an entry's contribution to the sum of this number.
template <int kNumber>
struct StoreTerm {
  float& term;

  template <typename Which, typename Index>
  __device__ __forceinline__ void operator()(Which, float, float*, int64_t, Index, float) const {}
  template <typename Index>
  __device__ __forceinline__ void operator()(program::Sum<kNumber>, float cotangent, float*, int64_t, Index,
                                             float x) const {
    term = cotangent != 0.0f ? x : 0.0f;
  }
};

// Adds the sum of this number to its address in HBM.
template <int kNumber>
struct AddSum {
  float sum;

  template <typename Which, typename Index>
  __device__ __forceinline__ void operator()(Which, float, float*, int64_t, Index, float) const {}
  template <typename Index>
  __device__ __forceinline__ void operator()(program::Sum<kNumber>, float, float* array, int64_t batch, Index at,
                                             float) const {
    AddToGlobalIf(sum != 0.0f, array + batch + at, sum);
  }
};

// Adds contributions that are not numbered sums to HBM, entry by entry.
struct AddOthers : program::AddSeparately<true> {
  using program::AddSeparately<true>::operator();
  template <int kNumber, typename Index>
  __device__ __forceinline__ void operator()(program::Sum<kNumber>, float, float*, int64_t, Index, float) const {}
};

// Adds the contributions of 16 rows of S^T, from entry x of a line on, to the gradients of captured arrays. The
// derivative must not depend on the score.
struct CapturedGradients {
  const Score& score;
  const View<true>& view;
  const int x, lane;

  __device__ __forceinline__ void Add(const float (&ds)[kEntriesOfBlock]) const {
#pragma unroll
    for (int i = 0; i < kEntriesOfBlock; ++i) Evaluate(i, ds[i], AddOthers());
    AddSums<0>(ds);
  }

  template <int kNumber>
  __device__ __forceinline__ void AddSums(const float (&ds)[kEntriesOfBlock]) const {
    if constexpr (program::kSumOver<kNumber> != program::SumKind::kEntries) {
      float terms[kEntriesOfBlock];
#pragma unroll
      for (int i = 0; i < kEntriesOfBlock; ++i) Evaluate(i, ds[i], StoreTerm<kNumber>{terms[i]});
      const BlockSum sum = SumOver<program::kSumOver<kNumber>>(terms, lane);
      const int row = view.Row(0, x) - lane % 4 * 2, key = view.key - lane / 4;
      Evaluate(EntryOf(score.p, score.batch, score.head, row + sum.row, key + sum.key), 0.0f, AddSum<kNumber>{sum.x});
      AddSums<kNumber + 1>(ds);
    }
  }

  template <typename Adds>
  __device__ __forceinline__ void Evaluate(int i, float ds, Adds add) const {
    Evaluate(EntryOf(score.p, score.batch, score.head, view, i / 2 % 2, x + i / 4 * 2 + i % 2), ds, add);
  }
  template <typename Adds>
  __device__ __forceinline__ void Evaluate(const program::Entry& at, float ds, Adds add) const {
    program::ScoreGrad<false>(Programs(score.p), at, 0.0f, ds, add);
  }
};

}  // namespace jax_flash::hopper::backward
