#include "cuda_src/program_source.h"

#include <cstdio>
#include <cstring>
#include <iterator>

namespace jax_flash {
namespace {

constexpr const char* kTypes[] = {"float", "int", "unsigned", "int"};  // of Type

constexpr const char* kElements[] = {
#define ENTRY(text, name, type, element) #element,
    JAX_FLASH_CAPTURED_DTYPES(ENTRY)
#undef ENTRY
};

// What the functions are called, of Op::const_f, ...: those of arithmetic as in common/ops.h.
constexpr const char* kNames[] = {
#define INPUT(name, ...) #name,
#define TYPED(T) "const_" #T, "load_" #T,
#define OP(name, ...) #name,
    JAX_FLASH_INPUTS(INPUT) JAX_FLASH_TYPES(TYPED) JAX_FLASH_OPS(OP) "accumulate",
    "result",
#undef INPUT
#undef TYPED
#undef OP
};

std::string Value(int number) { return "v" + std::to_string(number); }

std::string Constant(const Instruction& x) {
  if (x.type == Type::b) return x.constant != 0 ? "-1" : "0";
  if (x.type == Type::i) return "int(" + std::to_string(int64_t(x.constant)) + "ll)";
  if (x.type == Type::u) return std::to_string(int64_t(x.constant)) + "u";
  const float rounded = float(x.constant);
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return "__uint_as_float(" + std::to_string(bits) + "u)";
}

// The place of an entry in its array: indices outside are the nearest inside.
std::string Offset(const Captured& array, const Instruction& x) {
  std::string offset = array.batch ? "int64_t(at.row) * " + std::to_string(array.size()) + "ll" : "0ll";
  int64_t stride = array.size();
  for (int d = 0; d < array.rank; ++d) {
    stride /= array.dims[d];
    offset += " + Inside(" + Value(x.operands[d]) + ", " + std::to_string(array.dims[d] - 1) + ") * " +
              std::to_string(stride) + "ll";
  }
  return offset;
}

std::string Expression(const Problem& p, const Instruction& x) {
  switch (x.op) {
    case Op::score:
    case Op::cotangent:
      return kNames[int(x.op)];
    case Op::batch:
    case Op::head:
    case Op::query:
    case Op::key:
      return std::string("at.") + kNames[int(x.op)];
    case Op::const_f:
    case Op::const_i:
    case Op::const_u:
    case Op::const_b:
      return Constant(x);
    case Op::load_f:
    case Op::load_i:
    case Op::load_u:
    case Op::load_b: {
      const Captured& array = p.captured[x.array];
      const std::string element = "Look<" + std::string(kElements[int(array.dtype)]) + ">(p.captured[" +
                                  std::to_string(x.array) + "], " + Offset(array, x) + ")";
      return x.op == Op::load_b ? "Truth(" + element + " != 0)" : element;
    }
    default: {
      std::string call = kNames[int(x.op)] + std::string("(");
      for (int i = 0; i < x.count; ++i) call += (i ? ", " : "") + Value(x.operands[i]);
      return call + ")";
    }
  }
}

// A function of these arguments: the instructions, a line each. `otherwise` is what it gives where there is no program.
std::string Function(const Problem& p, const std::string& head, const Program& program, const char* otherwise) {
  const bool is_long = program.instructions.size() > size_t(kInlined);
  std::string text = std::string("__device__ ") + (is_long ? "__noinline__ " : "__forceinline__ ") + head + " {\n";
  for (int i = 0; i < int(program.instructions.size()); ++i) {
    const Instruction& x = program.instructions[i];
    if (x.op == Op::result) {
      text += "  return " + Value(x.operands[0]) + ";\n";
    } else if (x.op == Op::accumulate) {
      text += "  if (kAccumulates) Accumulate(p.dcaptured[" + std::to_string(x.array) + "], " +
              Offset(p.captured[x.array], x) + ", " + Value(x.operands[x.count - 1]) + ");\n";
    } else {
      text += std::string("  const ") + kTypes[int(x.type)] + " " + Value(i) + " = " + Expression(p, x) + ";\n";
    }
  }
  if (!program.present()) text += std::string("  return ") + otherwise + ";\n";
  return text + "}\n";
}

}  // namespace

std::string ProgramSource(const Problem& p) {
  const std::string given = "(const ProgramParams& p, const Place& at";
  std::string text = "#pragma once\nnamespace jax_flash::program {\n";
  text += Function(p, "float ScoreMod" + given + ", float score)", p.score_mod, "score");
  text += Function(p, "int MaskMod" + given + ")", p.mask_mod, "-1");
  text += "template <bool kAccumulates>\n";
  text += Function(p, "float ScoreGrad" + given + ", float score, float cotangent)", p.score_grad, "cotangent");
  return text + "}  // namespace jax_flash::program\n";
}

}  // namespace jax_flash
