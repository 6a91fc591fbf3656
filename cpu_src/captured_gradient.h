// Gradients of the arrays that score_mod loads from. Units of work that might add to the same entry have separate
// copies, which are summed in a fixed order. So the gradients are bitwise reproducible.
#pragma once

#include "common/arrays.h"
#include "common/problem.h"
#include "cpu_src/division.h"
#include "cpu_src/interpreter.h"
#include "cpu_src/workers.h"

namespace jax_flash::JAX_FLASH_ISA {

// Do units of different batch entries, of different heads, and of different parts of the keys add to disjoint entries
// of an array?
struct Disjoint {
  bool batch, heads, parts;

  Disjoint(const Problem& p, const Operands& in, int array) {
    const Captured& captured = p.captured_arrays()[array];
    const auto by = [&](Op op) { return EveryIndexes(p.score.score_grad, captured, array, op); };
    batch = captured.batch || Increase(in.program_batch, p.batch, by(Op::batch));
    heads = Increase(in.program_head, p.q_heads, by(Op::head));
    parts = by(Op::key) >= (in.origin ? in.origin[1] : 0) + p.kv_len;
  }

  int64_t copies(const WorkSplit& d) const {
    return (batch ? 1 : d.batch.units) * (heads ? 1 : d.heads.units) * (parts ? 1 : d.parts);
  }

 private:
  // The largest dim of the array that every accumulation indexes directly by this input; 0 if there is none. For
  // example, in t[h, k] + t[k, h] the head indexes a dim of each term, but not the same dim, and two heads add to the
  // same entries.
  static int64_t EveryIndexes(const Program& program, const Captured& captured, int array, Op input) {
    int64_t most = 0;
    for (int dim = 0; dim < captured.rank; ++dim) {
      bool every = true;
      for (int64_t i = 0; i < program.size(); ++i) {
        const Instruction& x = program.data()[i];
        every &= x.op != Op::accumulate || x.array != array || program.data()[x.operands[dim]].op == input;
      }
      if (every) most = Max(most, captured.dims[dim]);
    }
    return most;
  }

  // Do the numbers increase, and so are different indices of a dim of this size?
  static bool Increase(const int32_t* numbers, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; ++i) {
      if (numbers[i] < 0 || numbers[i] >= size || (i > 0 && numbers[i] <= numbers[i - 1])) return false;
    }
    return true;
  }
};

template <typename A>
class CapturedGradients {
 public:
  // The bytes of the copies, in addition to the results.
  static double Memory(const Problem& p, const Operands& in, const BackwardResults& out, const WorkSplit& division) {
    double bytes = 0;
    for (int i = 0; i < p.captured_count(); ++i) {
      const int64_t copies = out.captured[i] ? Disjoint(p, in, i).copies(division) : 1;
      bytes += double(copies - 1) * double(Elements(p, i)) * sizeof(A);
    }
    return bytes;
  }

  CapturedGradients(const Problem& p, const Operands& in, const BackwardResults& out, const WorkSplit& division,
                    Workers& workers)
      : p_(p), out_(out) {
    for (int i = 0; i < p.captured_count(); ++i) {
      if (!out.captured[i]) continue;
      requested_ = true;
      const Disjoint disjoint(p, in, i);
      of_[i].copies = disjoint.copies(division);
      of_[i].batch_stride = disjoint.batch ? 0 : 1;
      of_[i].head_stride = disjoint.heads ? 0 : disjoint.batch ? 1 : division.batch.units;
      of_[i].part_stride = disjoint.parts ? 0 : of_[i].copies / division.parts;
      const int64_t more = (of_[i].copies - 1) * Elements(p, i);
      if (more > 0) of_[i].memory = reinterpret_cast<A*>(workers.Allocate(more * int64_t(sizeof(A))));
    }
    ForEachSlice(workers, [this](int i, int64_t begin, int64_t size) {
      for (int64_t copy = 0; copy < of_[i].copies; ++copy) {
        std::memset(Copy(i, copy) + begin, 0, size_t(size) * sizeof(A));
      }
    });
  }

  // Are any gradients requested?
  bool requested() const { return requested_; }

  // The destination of a unit's additions for batch entry b.
  CapturedSums<A> Sums(int64_t b, int64_t batch_unit, int64_t head_unit, int64_t part) const {
    CapturedSums<A> sums;
    for (int i = 0; i < p_.captured_count(); ++i) {
      if (!out_.captured[i]) continue;
      const Copies& of = of_[i];
      const int64_t copy = batch_unit * of.batch_stride + head_unit * of.head_stride + part * of.part_stride;
      const Captured& captured = p_.captured_arrays()[i];
      sums.of[i] = Copy(i, copy) + (captured.batch ? b * captured.size() : 0);
    }
    return sums;
  }

  // Computes the results after all units.
  void Sum(Workers& workers) const {
    ForEachSlice(workers, [this](int i, int64_t begin, int64_t size) {
      A* const sum = Copy(i, 0) + begin;
      for (int64_t copy = 1; copy < of_[i].copies; ++copy) {
        const A* const term = Copy(i, copy) + begin;
        for (int64_t k = 0; k < size; ++k) sum[k] += term[k];
      }
    });
  }

 private:
  // The first copy is the result; `memory` has the others. A unit's numbers determine its copy.
  struct Copies {
    int64_t copies = 0, batch_stride = 0, head_stride = 0, part_stride = 0;
    A* memory = nullptr;
  };

  static int64_t Elements(const Problem& p, int array) {
    const Captured& captured = p.captured_arrays()[array];
    return (captured.batch ? p.batch : 1) * captured.size();
  }

  A* Copy(int array, int64_t copy) const {
    return copy == 0 ? static_cast<A*>(out_.captured[array]) : of_[array].memory + (copy - 1) * Elements(p_, array);
  }

  // Calls f(array, begin, size) for slices of all requested gradients, on all threads.
  template <typename F>
  void ForEachSlice(Workers& workers, F f) const {
    constexpr int64_t kSlice = 1 << 16;
    for (int i = 0; i < p_.captured_count(); ++i) {
      if (!out_.captured[i]) continue;
      const int64_t elements = Elements(p_, i);
      workers.For(RoundUp(elements, kSlice) / kSlice, 0,
                  [&](int64_t slice, char*) { f(i, slice * kSlice, Min(kSlice, elements - slice * kSlice)); });
    }
  }

  const Problem& p_;
  const BackwardResults& out_;
  bool requested_ = false;
  Copies of_[kMaxCaptured];
};

}  // namespace jax_flash::JAX_FLASH_ISA
