// Evaluates score programs (common/program.h) on blocks of S. It runs instruction by instruction over a few rows, with
// keys in vector lanes, so decoding an instruction costs little. Values that do not depend on the row, or on the
// column, are computed once for each block.
#pragma once

#include "common/arrays.h"
#include "common/problem.h"
#include "common/ranges.h"
#include "cpu_src/block.h"
#include "cpu_src/lanes.h"
#include "cpu_src/tile.h"

namespace jax_flash::JAX_FLASH_ISA {

// The mask bytes of a block: the byte of row r and column c is data[r * row_stride + c * column_stride].
struct MaskBytes {
  const uint8_t* data;
  int64_t row_stride, column_stride;
};

// The sums for the gradients of captured arrays, for one batch entry; null for gradients that are not requested.
template <typename A>
struct CapturedSums {
  A* of[kMaxCaptured] = {};
};

template <typename A>
class Interpreter {
 public:
  Interpreter() = default;
  Interpreter(const Problem& p, const Program& program, Carver* carver);

  bool present() const { return count_ > 0; }

  // Prepares the values that entries of a block share. The block belongs to head n of batch entry b. Its row i is query
  // i + offset; positions count from the operand `origin`.
  void Begin(const Operands& in, int64_t b, int64_t n, int64_t offset, const Block& block);
  // score_mod: replaces s_0 by S in some rows of the block.
  void Score(const Block& some, Tile<A> s);
  // score_grad: replaces dS by ds_0 in the whole block, given s_0, which it overwrites. Also adds to the sums.
  void Gradient(Tile<A> s, Tile<A> ds, const CapturedSums<A>* sums);
  // score_tangent: replaces the tangent of s_0 by the tangent of S in the whole block, given s_0, which it overwrites.
  void Tangent(Tile<A> s, Tile<A> ds);
  // mask_mod: a range of its results in the block, from values that entries share.
  Range ResultRange();
  // Evaluates mask_mod for every entry of the block, ...
  void Evaluate();
  // ... and returns its results for the rows from i0 on.
  MaskBytes Mask(int64_t i0) const;

 private:
  // The location of a value, with its byte strides between rows and between vectors of columns: 0 if it is the same.
  struct Location {
    char* data;
    int64_t row_bytes, vector_bytes;

    char* At(int64_t row, int64_t vector) const { return data + row * row_bytes + vector * vector_bytes; }
  };

  // The indices of a load or an accumulation, each with its stride.
  struct Indices {
    struct Index {
      Location location;
      int64_t last, stride;
      bool columns;
    };
    int rank;
    bool columns;  // do they differ between columns?
    int8_t step;   // 1 or -1 if neighbouring columns have neighbouring entries, in this direction; else 0
    Index index[kMaxCapturedRank];
  };

  // The entries of neighbouring columns: consecutive (kConsecutive), all equal (kSame), or anywhere (kScattered).
  // `first` is the lowest offset, relative to the row's offset.
  struct Access {
    enum { kConsecutive, kSame, kScattered } kind;
    int64_t first;
  };

  Location LocationOf(int64_t number) const;
  int64_t RowsOf(const Instruction& x) const { return x.rows ? rows_ : 1; }
  int64_t VectorsOf(const Instruction& x) const { return x.columns ? (Width() + kLanes<A> - 1) / kLanes<A> : 1; }
  int64_t Width() const { return block_.c1 - block_.c0; }

  // Runs the instructions with values that depend on the row or not, and on the column or not.
  void Run(bool rows, bool columns);
  void RunEntries(int64_t first, int64_t rows, Tile<A> s, Tile<A> ds);
  void Execute(int64_t number);
  template <Type R, typename F>
  void Make(int64_t number, F f);
  template <Type R, Type X, Type Y, Type Z, typename F>
  void Map(int64_t number, F f);
  template <Type R>
  void LoadArray(int64_t number);
  template <Type R, typename S>
  void LoadElements(int64_t number, const S* array);
  void Accumulate(const Instruction& x);
  void Result(const Instruction& x);

  // The range of a value in the block: exact if it has been computed, otherwise derived from its operands.
  Range KnownRange(int64_t number) const;
  template <Type R>
  Range Extremes(int64_t number) const;

  Indices IndicesOf(const Instruction& x) const;
  static int64_t RowOffset(const Indices& indices, int64_t row);
  static Access AccessOf(const Indices& indices, int64_t row, int64_t vector, int64_t count);
  static void Offsets(const Indices& indices, int64_t row, int64_t vector, int64_t* offsets);
  Vec<A> Cotangent(const Location& value, int64_t row, int64_t vector) const;

  const Captured* arrays_ = nullptr;
  const Instruction* instructions_ = nullptr;
  int64_t count_ = 0;
  ProgramKind kind_ = {};
  char** values_ = nullptr;  // of values without a slot
  Location* slots_ = nullptr;
  Range* ranges_ = nullptr;  // of values with a slot, in a mask_mod
  uint8_t* bytes_ = nullptr;

  // The rows first_ <= r < first_ + rows_ of a block, which are being computed.
  const Operands* in_ = nullptr;
  const CapturedSums<A>* sums_ = nullptr;
  int64_t b_ = 0, n_ = 0, offset_ = 0, first_key_ = 0;
  Block block_ = {};
  int64_t first_ = 0, rows_ = 0;
};

// The programs of a problem.
template <typename A>
struct Programs {
  Interpreter<A> score_mod, mask_mod, score_grad, score_tangent;

  Programs() = default;
  Programs(const Problem& p, Carver* carver)
      : score_mod(p, p.score.score_mod, carver),
        mask_mod(p, p.mask.mask_mod, carver),
        score_grad(p, p.score.score_grad, carver),
        score_tangent(p, p.score.score_tangent, carver) {}
};

}  // namespace jax_flash::JAX_FLASH_ISA
