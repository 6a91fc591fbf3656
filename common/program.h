// Score programs: straight-line scalar programs. score_mod changes the score of an entry, score_grad and score_tangent
// are its gradient and its tangent, and mask_mod decides whether an entry is visible. They are part of a problem's
// text; docs/design/score-programs.md lists their instructions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtype.h"
#include "common/ops.h"

namespace jax_flash {

// The dtypes of captured arrays, CAPTURED(text, name, type, element). `type` is the type of loaded values.
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
constexpr int kMaxInstructions = 4096;  // in a program

// An array that programs load from.
struct Captured {
  CapturedDType dtype = {};
  bool batch = false;     // is there one for each batch entry, or one for all?
  bool gradient = false;  // is its gradient requested? (backward only)
  int rank = 0;
  int64_t dims[kMaxCapturedRank] = {};

  // The number of elements for one batch entry.
  int64_t size() const;
  // The type of the values that `load` returns.
  Type type() const;
};

// Instruction::step of a value that does not change by -1, 0 or 1 from key to key.
constexpr int8_t kNoStep = 2;

struct Instruction {
  Op op = {};
  Type type = Type::n;  // type of its value
  // Does its value differ between rows, and between columns? It is computed once for all equal ones.
  bool rows = false, columns = false;
  bool of_score = false;  // does it depend on the score?
  int8_t step = 0;        // the increment of an i from key to key
  int16_t array = -1;     // index of the array of load and accumulate
  int16_t count = 0;      // number of operands
  int16_t slot = -1;      // where the value of an entry is stored; slots are reused after the last use of their value
  int16_t operands[kMaxCapturedRank + 1] = {};  // numbers of instructions; load and accumulate start with their indices
  double constant = 0;
};

// The slots of inputs that every entry has.
constexpr int kScoreSlot = 0, kDerivativeSlot = 1, kFirstFreeSlot = 2;

enum class ProgramKind { kScoreMod, kScoreGrad, kScoreTangent, kMaskMod };

struct Program {
  std::string text = "none";
  ProgramKind kind = {};
  std::vector<Instruction> instructions;
  int slots = kFirstFreeSlot;

  bool present() const { return !instructions.empty(); }
  // Does the result, or an addition to the gradient of a captured array, depend on the score?
  bool ResultOfScore() const;
  bool GradientsOfScore() const;
  // The instructions and their number, without standard library functions, for the CPU kernels.
  const Instruction* data() const;
  int64_t size() const;
};

// Parses "none" or "float32:1:4x63:1,int32:b::0": dtype, whether it has a batch dim, dims, whether its gradient is
// requested.
bool Parse(std::string_view text, std::vector<Captured>* captured);

// Decodes the instructions of `program->text`, for a problem with these arrays. Returns an error, or an empty string.
std::string DecodeProgram(ProgramKind kind, const std::vector<Captured>& captured, Program* program);

}  // namespace jax_flash
