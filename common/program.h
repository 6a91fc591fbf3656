// Score programs: straight-line programs of scalars that turn the score of an entry into another (score_mod), give the
// gradient or the tangent of that (score_grad, score_tangent), or say whether an entry may be attended to (mask_mod).
// They are part of a problem's text; docs/design/score-programs.md has their instructions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtype.h"
#include "common/ops.h"

namespace jax_flash {

// The dtypes of arrays that a program may load from, CAPTURED(text, name, type, element): `type` is that of what is
// loaded.
#define JAX_FLASH_CAPTURED_DTYPES(CAPTURED) \
  CAPTURED("float16", F16, f, F16)          \
  CAPTURED("bfloat16", BF16, f, BF16)       \
  CAPTURED("float32", F32, f, float)        \
  CAPTURED("float64", F64, f, double)       \
  CAPTURED("bool", PRED, b, uint8_t)        \
  CAPTURED("int8", S8, i, int8_t)           \
  CAPTURED("int16", S16, i, int16_t)        \
  CAPTURED("int32", S32, i, int32_t)        \
  CAPTURED("uint8", U8, u, uint8_t)         \
  CAPTURED("uint16", U16, u, uint16_t)      \
  CAPTURED("uint32", U32, u, uint32_t)

enum class CapturedDType : uint8_t {
#define JAX_FLASH_ENUMERATOR(text, name, ...) name,
  JAX_FLASH_CAPTURED_DTYPES(JAX_FLASH_ENUMERATOR)
#undef JAX_FLASH_ENUMERATOR
};

constexpr int kMaxCapturedRank = 8;     // dims of a captured array
constexpr int kMaxInstructions = 4096;  // of a program

// An array that programs load from.
struct Captured {
  CapturedDType dtype = {};
  bool batch = false;     // is there one for each batch entry, or one that all share?
  bool gradient = false;  // is its gradient asked for? (The backward only.)
  int rank = 0;
  int64_t dims[kMaxCapturedRank] = {};

  // How many elements the array of one batch entry has.
  int64_t size() const;
  // The type of what `load` gives.
  Type type() const;
};

// Instruction::step of a value that does not grow by -1, 0 or 1 from key to key.
constexpr int8_t kNoStep = 2;

struct Instruction {
  Op op = {};
  Type type = Type::n;  // type of its value
  // Whether its value differs from row to row, and from column to column: it is computed for as many as it needs.
  bool rows = false, columns = false;
  bool of_score = false;  // does it depend on the score?
  int8_t step = 0;        // how much an i grows from key to key
  int16_t array = -1;     // number of the array of load and accumulate
  int16_t count = 0;      // number of its operands
  int16_t slot = -1;  // where the value of an entry is kept; slots of values that are no longer needed are used again
  int16_t operands[kMaxCapturedRank + 1] =
      {};  // numbers of instructions; those of load and accumulate begin with indices
  double constant = 0;
};

// The slots of the inputs that are there for every entry.
constexpr int kScoreSlot = 0, kDerivativeSlot = 1, kFirstFreeSlot = 2;

enum class ProgramKind { kScoreMod, kScoreGrad, kScoreTangent, kMaskMod };

struct Program {
  std::string text = "none";
  ProgramKind kind = {};
  std::vector<Instruction> instructions;
  int slots = kFirstFreeSlot;

  bool present() const { return !instructions.empty(); }
  // Do what it gives, and what it adds to the gradients of captured arrays, depend on the score?
  bool ResultOfScore() const;
  bool GradientsOfScore() const;
  // The instructions, without functions of the standard library, for the CPU kernels.
  const Instruction* data() const;
  int64_t size() const;
};

// Reads "none" or "float32:1:4x63:1,int32:b::0": dtype, whether it has a batch, dims, whether its gradient is asked
// for.
bool Parse(std::string_view text, std::vector<Captured>* captured);

// Reads the instructions of `program->text`, of a problem that has these arrays. Returns an empty string, or what is
// wrong with them.
std::string DecodeProgram(ProgramKind kind, const std::vector<Captured>& captured, Program* program);

}  // namespace jax_flash
