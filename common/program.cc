#include "common/program.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <optional>

#include "common/numbers.h"

namespace jax_flash {
namespace {

// The text of an instruction, and the types of its value and operands.
struct Form {
  std::string_view text;
  Op op;
  Type type;
  Type operands[3] = {Type::n, Type::n, Type::n};
  bool rows = false, columns = false;  // of an input
};

constexpr Form kForms[] = {
#define INPUT(name, type, rows, columns) {#name, Op::name, Type::type, {Type::n, Type::n, Type::n}, rows, columns},
#define TYPED(T) {"const." #T, Op::const_##T, Type::T}, {"load." #T, Op::load_##T, Type::T},
#define OP(name, text, type, x, y, z, value) {text, Op::name, Type::type, {Type::x, Type::y, Type::z}},
    JAX_FLASH_INPUTS(INPUT) JAX_FLASH_TYPES(TYPED) JAX_FLASH_OPS(OP){"accumulate", Op::accumulate, Type::n},
    {"result", Op::result, Type::n},
#undef INPUT
#undef TYPED
#undef OP
};

struct DTypeName {
  std::string_view name;
  Type type;
};
constexpr DTypeName kCapturedDTypes[] = {
#define ENTRY(text, name, type, ...) {text, Type::type},
    JAX_FLASH_CAPTURED_DTYPES(ENTRY)
#undef ENTRY
};

// Removes and returns the part before the next separator. There is one more part than separators.
std::optional<std::string_view> Next(std::optional<std::string_view>* text, char separator) {
  if (!*text) return std::nullopt;
  const size_t end = (*text)->find(separator);
  const std::string_view part = (*text)->substr(0, end);
  if (end == std::string_view::npos) {
    *text = std::nullopt;
  } else {
    (*text)->remove_prefix(end + 1);
  }
  return part;
}

bool Parse(std::string_view text, Captured* captured) {
  std::optional<std::string_view> rest = text;
  const std::string_view dtype = *Next(&rest, ':');
  const auto lead = Next(&rest, ':'), dims = Next(&rest, ':'), gradient = Next(&rest, ':');
  const auto known = std::find_if(std::begin(kCapturedDTypes), std::end(kCapturedDTypes),
                                  [&](const DTypeName& known) { return known.name == dtype; });
  if (known == std::end(kCapturedDTypes) || !gradient || rest) return false;
  captured->dtype = CapturedDType(known - kCapturedDTypes);
  captured->batch = lead == "b";
  captured->gradient = gradient == "1";
  if ((lead != "b" && lead != "1") || (gradient != "0" && gradient != "1")) return false;
  if (dims->empty()) return true;
  rest = dims;
  while (rest) {
    if (captured->rank == kMaxCapturedRank || !ParseInteger(*Next(&rest, 'x'), &captured->dims[captured->rank++])) {
      return false;
    }
  }
  return true;
}

// Decodes the instructions of a program in order.
class Decoder {
 public:
  Decoder(const std::vector<Captured>& captured, Program* program) : captured_(captured), program_(*program) {}

  // Adds an instruction. Returns an error, or an empty string.
  std::string Add(std::string_view text) {
    std::optional<std::string_view> rest = text;
    const std::string_view name = *Next(&rest, ',');
    const Form* const form =
        std::find_if(std::begin(kForms), std::end(kForms), [&](const Form& form) { return form.text == name; });
    if (form == std::end(kForms)) return "there is no such instruction";
    if (!Has(form->op)) return "this program has no " + std::string(name);
    if (form->op == Op::score || form->op == Op::cotangent || form->op == Op::tangent) {
      for (const Instruction& other : program_.instructions) {
        if (other.op == form->op) return "it is there twice";
      }
    }
    Instruction instruction;
    instruction.op = form->op;
    instruction.type = form->type;
    instruction.rows = form->rows;
    instruction.columns = form->columns;
    instruction.of_score = form->op == Op::score;
    std::string wrong = TakeFields(*form, &rest, &instruction);
    if (wrong.empty() && rest) wrong = "it has too many fields";
    if (!wrong.empty()) return wrong;
    instruction.step = StepOf(instruction);
    program_.instructions.push_back(instruction);
    return "";
  }

 private:
  using Fields = std::optional<std::string_view>;

  bool Has(Op op) const {
    if (op == Op::score) return program_.kind != ProgramKind::kMaskMod;
    if (op == Op::tangent) return program_.kind == ProgramKind::kScoreTangent;
    return (op != Op::cotangent && op != Op::accumulate) || program_.kind == ProgramKind::kScoreGrad;
  }

  std::string TakeFields(const Form& form, Fields* rest, Instruction* instruction) {
    switch (form.op) {
      case Op::const_f:
      case Op::const_i:
      case Op::const_u:
      case Op::const_b:
        return TakeConstant(form.type, rest, instruction);
      case Op::load_f:
      case Op::load_i:
      case Op::load_u:
      case Op::load_b:
        return TakeArray(rest, instruction);
      case Op::accumulate: {
        const std::string wrong = TakeArray(rest, instruction);
        instruction->rows = instruction->columns = true;
        return wrong.empty() ? TakeOperand(Type::f, rest, instruction) : wrong;
      }
      case Op::result: {
        const bool mask = program_.kind == ProgramKind::kMaskMod;
        if (!mask) instruction->rows = instruction->columns = true;
        return TakeOperand(mask ? Type::b : Type::f, rest, instruction);
      }
      default:
        for (const Type type : form.operands) {
          if (type == Type::n) break;
          const std::string wrong = TakeOperand(type, rest, instruction);
          if (!wrong.empty()) return wrong;
        }
        return "";
    }
  }

  std::string TakeConstant(Type type, Fields* rest, Instruction* instruction) {
    const Fields field = Next(rest, ',');
    int64_t integer = 0;
    bool read = field.has_value();
    if (read && type == Type::f) {
      read = ParseHexFloat(*field, &instruction->constant);
    } else if (read) {
      read = ParseInteger(*field, &integer);
      const bool fits = type == Type::i   ? integer == int32_t(integer)
                        : type == Type::u ? integer == uint32_t(integer)
                                          : integer == 0 || integer == 1;
      read = read && fits;
      instruction->constant = double(integer);
    }
    return read ? "" : "it is no constant of its type";
  }

  std::string TakeArray(Fields* rest, Instruction* instruction) {
    const Fields field = Next(rest, ',');
    int64_t number = 0;
    if (!field || !ParseInteger(*field, &number) || number < 0 || number >= int64_t(captured_.size())) {
      return "there is no such array";
    }
    const Captured& array = captured_[number];
    if (instruction->op == Op::accumulate ? !array.gradient : array.type() != instruction->type) {
      return "the array is of another kind";
    }
    if (array.size() == 0) return "the array is empty";
    instruction->array = int16_t(number);
    for (int dim = 0; dim < array.rank; ++dim) {
      const std::string wrong = TakeOperand(Type::i, rest, instruction);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  std::string TakeOperand(Type type, Fields* rest, Instruction* instruction) {
    const Fields field = Next(rest, ',');
    if (!field) return "it has too few fields";
    int64_t number = 0;
    if (!ParseInteger(*field, &number) || number < 0 || number >= int64_t(program_.instructions.size())) {
      return "there is no value " + std::string(*field) + " before it";
    }
    const Instruction& operand = program_.instructions[number];
    if (operand.type != type) return "value " + std::string(*field) + " has another type than it takes";
    instruction->operands[instruction->count++] = int16_t(number);
    instruction->rows |= operand.rows;
    instruction->columns |= operand.columns;
    instruction->of_score |= operand.of_score;
    return "";
  }

  int8_t StepOf(const Instruction& instruction) const {
    if (!instruction.columns) return 0;
    if (instruction.op == Op::key) return 1;
    const auto step = [&](int operand) { return int(program_.instructions[instruction.operands[operand]].step); };
    int sum = kNoStep;
    if (instruction.op == Op::add_i && step(0) != kNoStep && step(1) != kNoStep) sum = step(0) + step(1);
    if (instruction.op == Op::sub_i && step(0) != kNoStep && step(1) != kNoStep) sum = step(0) - step(1);
    if (instruction.op == Op::neg_i && step(0) != kNoStep) sum = -step(0);
    return int8_t(std::abs(sum) <= 1 ? sum : kNoStep);
  }

  const std::vector<Captured>& captured_;
  Program& program_;
};

// Gives every value of an entry a slot, from its instruction to its last use. The cotangent keeps its slot, because it
// decides whether the result counts. So does the tangent.
void AssignSlots(Program* program) {
  std::vector<Instruction>& instructions = program->instructions;
  std::vector<size_t> last(instructions.size());  // the last use; 0 if there is none
  for (size_t i = 0; i < instructions.size(); ++i) {
    for (int k = 0; k < instructions[i].count; ++k) last[instructions[i].operands[k]] = i;
  }
  std::vector<int16_t> free;
  for (size_t i = 0; i < instructions.size(); ++i) {
    Instruction& instruction = instructions[i];
    for (int k = 0; k < instruction.count; ++k) {
      const int16_t operand = instruction.operands[k], slot = instructions[operand].slot;
      const bool reusable = slot >= 0 && slot != kDerivativeSlot && last[operand] == i;
      if (reusable && std::find(free.begin(), free.end(), slot) == free.end()) free.push_back(slot);
    }
    if (!instruction.rows || !instruction.columns || instruction.type == Type::n) continue;
    if (instruction.op == Op::score) {
      instruction.slot = kScoreSlot;
    } else if (instruction.op == Op::cotangent || instruction.op == Op::tangent) {
      instruction.slot = kDerivativeSlot;
    } else if (free.empty()) {
      instruction.slot = int16_t(program->slots++);
    } else {
      // The score has the lowest slot. It is reused first, because the result must be there.
      const auto slot = std::min_element(free.begin(), free.end());
      instruction.slot = *slot;
      free.erase(slot);
    }
    if (last[i] == 0 && instruction.slot != kDerivativeSlot) free.push_back(instruction.slot);
  }
}

}  // namespace

int64_t Captured::size() const {
  int64_t product = 1;
  for (int dim = 0; dim < rank; ++dim) product *= dims[dim];
  return product;
}

Type Captured::type() const { return kCapturedDTypes[int(dtype)].type; }

bool Program::ResultOfScore() const { return present() && instructions.back().of_score; }
bool Program::GradientsOfScore() const {
  return std::any_of(instructions.begin(), instructions.end(),
                     [](const Instruction& x) { return x.op == Op::accumulate && x.of_score; });
}

const Instruction* Program::data() const { return instructions.data(); }
int64_t Program::size() const { return int64_t(instructions.size()); }

bool Parse(std::string_view text, std::vector<Captured>* captured) {
  if (text == "none") return true;
  std::optional<std::string_view> rest = text;
  while (rest) {
    captured->emplace_back();
    if (!Parse(*Next(&rest, ','), &captured->back())) return false;
  }
  return true;
}

std::string DecodeProgram(ProgramKind kind, const std::vector<Captured>& captured, Program* program) {
  program->kind = kind;
  if (program->text == "none") return "";
  Decoder decoder(captured, program);
  std::optional<std::string_view> rest = program->text;
  while (rest) {
    const std::string_view instruction = *Next(&rest, ';');
    if (program->size() == kMaxInstructions)
      return "it has more than " + std::to_string(kMaxInstructions) + " instructions";
    const std::string wrong = decoder.Add(instruction);
    if (!wrong.empty()) {
      return "instruction " + std::to_string(program->size()) + ", '" + std::string(instruction) + "': " + wrong;
    }
    const bool done = program->instructions.back().op == Op::result;
    if (done && rest) return "something follows its result";
    if (!done && !rest) return "it has no result";
  }
  AssignSlots(program);
  return "";
}

}  // namespace jax_flash
