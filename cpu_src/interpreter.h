// Score programs (common/program.h) at work on blocks of S: instruction by instruction over a few rows, with the keys
// in vector lanes, so that finding out what an instruction is costs little. What does not differ from row to row, or
// from column to column, is computed once a block.
#pragma once

#include "common/arrays.h"
#include "common/problem.h"
#include "common/ranges.h"
#include "cpu_src/block.h"
#include "cpu_src/lanes.h"
#include "cpu_src/tile.h"

namespace jax_flash::JAX_FLASH_ISA {

// Whether entries of a block may be attended to: that in row r and column c by data[r * row_stride + c *
// column_stride].
struct MaskBytes {
  const uint8_t* data;
  int64_t row_stride, column_stride;
};

// Where gradients of the captured arrays are added up, of one batch entry; null where nobody asks for them.
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

  // What is the same for several entries of a block of head n of batch entry b, whose row i is query i + offset,
  // counted from its first key, as the operand origin says.
  void Begin(const Operands& in, int64_t b, int64_t n, int64_t offset, const Block& block);
  // score_mod: S of some rows of it, from s_0 in its place.
  void Score(const Block& some, Tile<A> s);
  // score_grad: ds_0 of all of it from s_0, which is overwritten, and dS, in its place; adds to the sums.
  void Gradient(Tile<A> s, Tile<A> ds, const CapturedSums<A>* sums);
  // score_tangent: the tangent of S of all of it from s_0, which is overwritten, and the tangent of s_0, in its place.
  void Tangent(Tile<A> s, Tile<A> ds);
  // mask_mod: what it can say of the block's entries, as far as that follows from what several of them share.
  Range Verdict();
  // It is asked entry by entry ...
  void Ask();
  // ... and has said this of the rows from i0 on.
  MaskBytes Mask(int64_t i0) const;

 private:
  // Where a value is, and how far apart it is for the next row and vector of columns: 0 if it is the same.
  struct Place {
    char* data;
    int64_t row_bytes, vector_bytes;

    char* At(int64_t row, int64_t vector) const { return data + row * row_bytes + vector * vector_bytes; }
  };

  // The indices of a load or an accumulation, each with how far apart its entries are.
  struct Indices {
    struct Index {
      Place place;
      int64_t last, stride;
      bool columns;
    };
    int rank;
    bool columns;  // whether they differ from column to column
    int8_t step;   // 1 or -1 if they are neighbours, forwards or backwards, else 0
    Index index[kMaxCapturedRank];
  };

  // Of neighbouring columns: whether their entries are neighbours, or one and the same, beyond whose index all of
  // theirs are, or anywhere; with the offset of the entry with the least index beside that of the row.
  struct Reach {
    enum { kRun, kSame, kScattered } kind;
    int64_t first;
  };

  Place PlaceOf(int64_t number) const;
  int64_t RowsOf(const Instruction& x) const { return x.rows ? rows_ : 1; }
  int64_t VectorsOf(const Instruction& x) const { return x.columns ? (Width() + kLanes<A> - 1) / kLanes<A> : 1; }
  int64_t Width() const { return block_.c1 - block_.c0; }

  // The instructions whose values differ from row to row, and from column to column, or do not.
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

  // What a value is in the block, if it has been computed; what it can be, if not.
  Range Known(int64_t number) const;
  template <Type R>
  Range Extremes(int64_t number) const;

  Indices IndicesOf(const Instruction& x) const;
  static int64_t RowOffset(const Indices& indices, int64_t row);
  static Reach ReachOf(const Indices& indices, int64_t row, int64_t vector, int64_t count);
  static void Offsets(const Indices& indices, int64_t row, int64_t vector, int64_t* offsets);
  Vec<A> Cotangent(const Place& value, int64_t row, int64_t vector) const;

  const Captured* arrays_ = nullptr;
  const Instruction* instructions_ = nullptr;
  int64_t count_ = 0;
  ProgramKind kind_ = {};
  char** values_ = nullptr;  // of instructions without a slot
  Place* slots_ = nullptr;
  Range* ranges_ = nullptr;  // of instructions with a slot, of a mask_mod
  uint8_t* bytes_ = nullptr;

  // What is being worked on: rows first_ <= r < first_ + rows_ of a block.
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
