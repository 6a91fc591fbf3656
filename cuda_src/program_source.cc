#include "cuda_src/program_source.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_src/program_analysis.h"

namespace jax_flash {
namespace {

constexpr const char* kTypes[] = {"float", "int", "unsigned", "int"};  // of Type

constexpr const char* kElements[] = {
#define ENTRY(text, name, type, element) #element,
    JAX_FLASH_CAPTURED_DTYPES(ENTRY)
#undef ENTRY
};

constexpr const char* kSumNames[] = {"kNothing", "kRows", "kKeys", "kDiagonals"};

// Names of the functions for Op::const_f, ...; arithmetic has the names of common/ops.h.
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

// May an int with this range wrap around?
bool MayWrap(const Range& range) { return range == EveryValue(Type::i); }

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

// A program, and the facts about its values. If the program is inlined, ramps stay in the form of ramps.
struct Source {
  const Problem& p;
  const Program& program;
  const std::vector<Facts> facts = FactsOf(p, program);
  const bool is_called = program.size() > kMaxInlined && &program != &p.mask.mask_mod;  // is it not inlined?

  bool IsRamp(int number, Type type = Type::f) const {
    return !is_called && facts[number].ramp && program.instructions[number].type == type;
  }
  std::string ValueHere(int number) const { return Value(number) + (IsRamp(number) ? ".Here()" : ""); }

  // The text of the ramp of an int.
  std::string Ramp(int number) const {
    const Steps& steps = facts[number].steps;
    return "RampOf(" + Value(number) + ", " + std::to_string(int32_t(steps.row)) + ", " +
           std::to_string(int32_t(steps.key)) + ", at)";
  }

  // The text of an index, clamped if it may be out of range.
  std::string Index(int value, int64_t size) const {
    const Range inside = {0, double(size - 1)};
    if (facts[value].anywhere.IsWithin(inside)) return Value(value);
    return std::string("ClampIndex<") + (facts[value].within.IsWithin(inside) ? "kInBounds" : "false") + ">(" +
           Value(value) + ", " + std::to_string(size - 1) + ")";
  }

  // The text of an element's address: the array, the offset of its batch entry, and the index in it.
  std::string Element(const std::string& array, const Instruction& x) const {
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
    case Op::tangent:
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
      const std::string element = std::string("LoadCaptured<") + kElements[int(p.captured[x.array].dtype)] + ">(" +
                                  Element("p.captured", x) + ")";
      return x.op == Op::load_b ? "Truth(" + element + " != 0)" : element;
    }
    default: {
      const int first = x.operands[0];
      if (x.op == Op::cast_i_f && IsRamp(number)) return Ramp(first);
      if (x.op == Op::cast_i_f && program.instructions[first].op == Op::abs_i) {
        const int before = program.instructions[first].operands[0];
        if (IsRamp(before, Type::i)) return "abs_f(" + Ramp(before) + ".Here())";
      }
      // Signed additions that cannot wrap: the compiler moves constant parts into the addresses of loads.
      const char* sign = x.op == Op::add_i ? " + " : x.op == Op::sub_i ? " - " : nullptr;
      const std::string sum = sign == nullptr ? "" : Value(x.operands[0]) + sign + Value(x.operands[1]);
      if (sign != nullptr && !MayWrap(facts[number].anywhere)) return sum;
      std::string call = kNames[int(x.op)] + std::string("(");
      for (int i = 0; i < x.count; ++i)
        call += (i ? ", " : "") + (IsRamp(number) ? Value(x.operands[i]) : ValueHere(x.operands[i]));
      call += ")";
      if (sign != nullptr && !MayWrap(facts[number].within)) return "kInBounds ? " + sum + " : " + call;
      if (facts[number].same < 0) return call;
      return "Known<kInBounds>(" + Value(x.operands[facts[number].same]) + ", " + call + ")";
    }
  }
}

// The text of a function with these parameters, one line for each instruction. `otherwise` is its result without a
// program. The text before the function defines the kinds of its sums.
std::string Source::Function(const std::string& parameters, const std::string& head, const char* otherwise) const {
  std::string text = "template <" + parameters + ">\n__device__ ", before;
  int sums = 0;
  text += (is_called ? "__noinline__ " : "__forceinline__ ") + head + " {\n";
  for (int i = 0; i < int(program.instructions.size()); ++i) {
    const Instruction& x = program.instructions[i];
    if (x.op == Op::result) {
      text += "  return " + ValueHere(x.operands[0]) + ";\n";
    } else if (x.op == Op::accumulate) {
      std::string which = "Unsummed";
      if (facts[i].sum_kind != SumKind::kEntries) {
        const std::string number = "<" + std::to_string(sums++) + ">";
        before += "template <>\nconstexpr SumKind kSumOver" + number +
                  " = SumKind::" + kSumNames[int(facts[i].sum_kind)] + ";\n";
        which = "Sum" + number;
      }
      text += "  add(" + which + "(), cotangent, " + Element("p.dcaptured", x) + ", " +
              ValueHere(x.operands[x.count - 1]) + ");\n";
    } else {
      text += std::string("  const ") + (IsRamp(i) ? "Ramp" : kTypes[int(x.type)]) + " " + Value(i) + " = " +
              Expression(i) + ";\n";
    }
  }
  if (!program.present()) text += std::string("  return ") + otherwise + ";\n";
  return before + text + "}\n";
}

std::string Flag(const char* name, bool value) {
  return std::string("constexpr bool ") + name + " = " + (value ? "true" : "false") + ";\n";
}

}  // namespace

std::string ProgramSource(const Problem& p) {
  const std::string given = "(const ProgramParams& p, const Entry& at";
  std::string text = "#pragma once\nnamespace jax_flash::program {\n";
  const Extent mask = p.mask_mod_extent();
  text += Flag("kMaskRows", mask.rows) + Flag("kMaskColumns", mask.columns);
  text += Flag("kSlopes", p.score.score_grad.ResultOfScore());
  text += Source{p, p.score.score_mod}.Function("bool kInBounds", "float ScoreMod" + given + ", float score)", "score");
  const bool known = text.find("<kInBounds>") != std::string::npos;
  text += Flag("kClampsIndices", known);
  text += Source{p, p.score.score_grad}.Function("bool kInBounds, typename Add",
                                                 "float ScoreGrad" + given + ", float score, float cotangent, Add add)",
                                                 "cotangent");
  text += Source{p, p.score.score_tangent}.Function(
      "bool kInBounds", "float ScoreTangent" + given + ", float score, float tangent)", "tangent");
  const bool is_long = p.mask.mask_mod.size() > kMaxInlined;
  text += Source{p, p.mask.mask_mod}.Function("bool kInBounds", "int MaskMod" + given + ")", "-1");
  text += Flag("kLongMask", is_long);
  return text + "}  // namespace jax_flash::program\n";
}

}  // namespace jax_flash
