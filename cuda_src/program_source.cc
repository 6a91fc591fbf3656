#include "cuda_src/program_source.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_src/contract.h"

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

// --- What an integer can be ---

struct Range {
  int64_t low = INT32_MIN, high = INT32_MAX;

  bool IsWithin(const Range& other) const { return other.low <= low && high <= other.high; }
};

// Of every value of a program, in so many rows and keys; what may wrap around can be anything.
std::vector<Range> RangesOf(const Problem& p, const Program& program, int64_t rows, int64_t keys) {
  std::vector<Range> ranges;
  for (const Instruction& x : program.instructions) {
    const auto operand = [&](int i) { return ranges[x.operands[i]]; };
    Range range;
    switch (x.op) {
      case Op::query:
        if (p.query_is_row()) range = {0, rows - 1};
        break;
      case Op::key:
        range = {0, keys - 1};
        break;
      case Op::const_i:
        range = {int64_t(x.constant), int64_t(x.constant)};
        break;
      case Op::add_i:
        range = {operand(0).low + operand(1).low, operand(0).high + operand(1).high};
        break;
      case Op::sub_i:
        range = {operand(0).low - operand(1).high, operand(0).high - operand(1).low};
        break;
      case Op::min_i:
        range = {std::min(operand(0).low, operand(1).low), std::min(operand(0).high, operand(1).high)};
        break;
      case Op::max_i:
        range = {std::max(operand(0).low, operand(1).low), std::max(operand(0).high, operand(1).high)};
        break;
      case Op::abs_i:
        range = {std::max({operand(0).low, -operand(0).high, int64_t(0)}), std::max(-operand(0).low, operand(0).high)};
        break;
      default:
        break;
    }
    ranges.push_back(range.IsWithin(Range()) ? range : Range());
  }
  return ranges;
}

// --- The text ---

// A program, and what its values can be: at entries within T and S, and wherever tiles have some.
struct Source {
  const Problem& p;
  const Program& program;
  const std::vector<Range> within = RangesOf(p, program, p.q_len, p.kv_len);
  const std::vector<Range> anywhere =
      RangesOf(p, program, p.q_len_in_blocks() + kLargestStep, p.kv_len_in_blocks() + kLargestStep);

  // The index of a dimension: where it can be outside, the nearest inside.
  std::string Index(int value, int64_t size) const {
    const Range inside = {0, size - 1};
    if (anywhere[value].IsWithin(inside)) return Value(value);
    return std::string("Inside<") + (within[value].IsWithin(inside) ? "kWithin" : "false") + ">(" + Value(value) +
           ", " + std::to_string(size - 1) + ")";
  }

  // An entry's array, of its batch entry, and its place in that.
  std::string Place(const std::string& array, const Instruction& x) const {
    const Captured& captured = p.captured[x.array];
    const bool fits = captured.size() <= INT32_MAX;
    std::string text = array + "[" + std::to_string(x.array) + "], ";
    text += captured.batch ? "at.row * " + std::to_string(captured.size()) + "ll, " : "0, ";
    int64_t stride = captured.size();
    for (int d = 0; d < captured.rank; ++d) {
      stride /= captured.dims[d];
      text += (d > 0 ? " + " : "") + Index(x.operands[d], captured.dims[d]) + " * " + std::to_string(stride) +
              (fits ? "" : "ll");
    }
    return text + (captured.rank > 0 ? "" : "0");
  }

  std::string Expression(int number) const;
  std::string Function(const std::string& parameters, const std::string& head, const char* otherwise) const;
};

std::string Source::Expression(int number) const {
  const Instruction& x = program.instructions[number];
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
      const std::string element =
          std::string("Look<") + kElements[int(p.captured[x.array].dtype)] + ">(" + Place("p.captured", x) + ")";
      return x.op == Op::load_b ? "Truth(" + element + " != 0)" : element;
    }
    default: {
      // As integers that do not wrap around, of which the compiler leaves constant parts to the loads.
      const bool wraps = Range().IsWithin(anywhere[number]);
      if (!wraps && x.op == Op::add_i) return Value(x.operands[0]) + " + " + Value(x.operands[1]);
      if (!wraps && x.op == Op::sub_i) return Value(x.operands[0]) + " - " + Value(x.operands[1]);
      std::string call = kNames[int(x.op)] + std::string("(");
      for (int i = 0; i < x.count; ++i) call += (i ? ", " : "") + Value(x.operands[i]);
      return call + ")";
    }
  }
}

// A function of these arguments: the instructions, a line each. `otherwise` is what it gives where there is no program.
std::string Source::Function(const std::string& parameters, const std::string& head, const char* otherwise) const {
  const bool is_long = program.instructions.size() > size_t(kInlined) && &program != &p.mask_mod;
  std::string text = "template <" + parameters + ">\n__device__ ";
  text += (is_long ? "__noinline__ " : "__forceinline__ ") + head + " {\n";
  for (int i = 0; i < int(program.instructions.size()); ++i) {
    const Instruction& x = program.instructions[i];
    if (x.op == Op::result) {
      text += "  return " + Value(x.operands[0]) + ";\n";
    } else if (x.op == Op::accumulate) {
      text += "  if (kAccumulates) Accumulate(cotangent, " + Place("p.dcaptured", x) + ", " +
              Value(x.operands[x.count - 1]) + ");\n";
    } else {
      text += std::string("  const ") + kTypes[int(x.type)] + " " + Value(i) + " = " + Expression(i) + ";\n";
    }
  }
  if (!program.present()) text += std::string("  return ") + otherwise + ";\n";
  return text + "}\n";
}

}  // namespace

std::string ProgramSource(const Problem& p) {
  const std::string given = "(const ProgramParams& p, const Place& at";
  std::string text = "#pragma once\nnamespace jax_flash::program {\n";
  text += Source{p, p.score_mod}.Function("bool kWithin", "float ScoreMod" + given + ", float score)", "score");
  text += Source{p, p.score_grad}.Function("bool kWithin, bool kAccumulates",
                                           "float ScoreGrad" + given + ", float score, float cotangent)", "cotangent");
  const bool known = text.find("Inside<kWithin>") != std::string::npos;
  text += std::string("constexpr bool kLessWithin = ") + (known ? "true" : "false") + ";\n";
  const bool is_long = p.mask_mod.size() > kInlined;
  text += Source{p, p.mask_mod}.Function("bool kWithin", "int MaskMod" + given + ")", "-1");
  text += std::string("constexpr bool kLongMask = ") + (is_long ? "true" : "false") + ";\n";
  return text + "}  // namespace jax_flash::program\n";
}

}  // namespace jax_flash
