#include "common/problem.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <variant>

#include "common/arrays.h"
#include "common/numbers.h"

namespace jax_flash {
namespace {

// A field of the text: its name and its destination. The type of the destination defines the parser.
struct Field {
  template <typename T>
  using Of = T* (*)(Problem*);

  std::string_view name;
  std::variant<Of<int64_t>, Of<double>, Of<bool>, Of<DType>, Of<Extent>, Of<WindowSize>, Of<std::vector<Captured>>,
               Of<Program>, Of<RequestedGradients>, Of<MovingOperands>>
      member;
};

#define ENTRY(type, name, value) {#name, +[](Problem* p) { return &p->name; }},
#define MASK_ENTRY(type, name, value) {"mask." #name, +[](Problem* p) { return &p->mask.name; }},
#define SCORE_ENTRY(type, name, value) {"score." #name, +[](Problem* p) { return &p->score.name; }},
constexpr Field kFields[] = {
    JAX_FLASH_PROBLEM(ENTRY){"requested", +[](Problem* p) -> RequestedGradients* { return p; }},
    {"moving", +[](Problem* p) -> MovingOperands* { return p; }},
    JAX_FLASH_MASK(MASK_ENTRY) JAX_FLASH_SCORE(SCORE_ENTRY)};
#undef ENTRY
#undef MASK_ENTRY
#undef SCORE_ENTRY
constexpr size_t kFieldCount = sizeof(kFields) / sizeof(kFields[0]);

bool Parse(std::string_view text, int64_t* value) { return ParseInteger(text, value); }
bool Parse(std::string_view text, double* value) { return ParseDecimal(text, value); }

bool Parse(std::string_view text, bool* value) {
  *value = text == "1";
  return text == "0" || text == "1";
}

bool Parse(std::string_view text, DType* value) {
  constexpr std::string_view kNames[] = {"none", "float16", "bfloat16", "float32", "float64"};
  for (int i = 0; i < 5; ++i) {
    if (text == kNames[i]) {
      *value = DType(i);
      return true;
    }
  }
  return false;
}

// "none", or the four letters of [B, N, T, S] with "1" for a broadcast dimension.
bool Parse(std::string_view text, Extent* value) {
  if (text == "none") return true;
  if (text.size() != 4) return false;
  bool full[4];
  for (int i = 0; i < 4; ++i) {
    full[i] = text[i] == "bnts"[i];
    if (!full[i] && text[i] != '1') return false;
  }
  *value = {true, full[0], full[1], full[2], full[3]};
  return true;
}

// "left,right"
bool Parse(std::string_view text, WindowSize* value) {
  const size_t comma = text.find(',');
  return comma != text.npos && ParseInteger(text.substr(0, comma), &value->left) &&
         ParseInteger(text.substr(comma + 1), &value->right);
}

// Different names with commas between them, or "none". `flag` returns the flag of a name, or null.
template <typename FlagOf>
bool ParseNames(std::string_view text, FlagOf flag) {
  if (text == "none") return true;
  for (;;) {
    const size_t comma = text.find(',');
    bool* const named = flag(text.substr(0, comma));
    if (named == nullptr || *named) return false;
    *named = true;
    if (comma == text.npos) return true;
    text.remove_prefix(comma + 1);
  }
}

bool Parse(std::string_view text, RequestedGradients* value) {
  return ParseNames(text, [value](std::string_view name) -> bool* {
#define FIND(operand, gradient, ...) \
  if (name == #gradient) return &value->gradient;
    JAX_FLASH_DERIVATIVES(FIND)
#undef FIND
    return nullptr;
  });
}

bool Parse(std::string_view text, MovingOperands* value) {
  return ParseNames(text, [value](std::string_view name) -> bool* {
#define FIND(operand, ...) \
  if (name == #operand) return &value->operand##_tangent;
    JAX_FLASH_DERIVATIVES(FIND)
#undef FIND
    return nullptr;
  });
}

// The instructions are decoded after all fields are read.
bool Parse(std::string_view text, Program* value) {
  value->text = text;
  return true;
}

// Can such an array exist? If so, 64 bits are enough for all computations with its sizes, with padding and in bytes. A
// size of 0 counts as 1, because some computations use only the other sizes.
constexpr double kMaxElements = 0x1p52;

bool CanExist(const Problem& p, const char* dims, const Extent& extent) {
  double elements = 1;
  for (; extent.present && *dims; ++dims) elements *= double(std::max<int64_t>(p.size(*dims, extent), 1));
  return elements <= kMaxElements;
}

// The same for an array that programs load from. Its sizes must not be negative.
bool CanExist(const Problem& p, const Captured& captured) {
  double elements = double(std::max<int64_t>(captured.batch ? p.batch : 1, 1));
  for (int dim = 0; dim < captured.rank; ++dim) {
    if (captured.dims[dim] < 0) return false;
    elements *= double(std::max<int64_t>(captured.dims[dim], 1));
  }
  return elements <= kMaxElements;
}

// Does each dim that is always 1 also have size 1 in the extent?
bool FitsDims(const char* dims, const Extent& extent) {
  const std::string_view letters = dims;
  const bool full[] = {extent.batch, extent.heads, extent.rows, extent.columns};
  for (size_t i = 0; i < letters.size(); ++i) {
    if (letters[i] == '1' && full[i]) return false;
  }
  return true;
}

bool AtLeast(int64_t value, int64_t least) { return value >= least; }
bool AtLeast(double value, double least) { return value >= least; }
bool AtLeast(const WindowSize& value, const WindowSize& least) {
  return value.left >= least.left && value.right >= least.right;
}
template <typename T>
bool AtLeast(const T&, const T&) {
  return true;
}

// Returns an error if values are invalid, although they could be parsed.
std::string Check(Problem* problem) {
  const Problem& p = *problem;
  Problem least;
  for (const Field& field : kFields) {
    const auto enough = [&](auto member) { return AtLeast(*member(problem), *member(&least)); };
    if (!std::visit(enough, field.member)) return std::string(field.name) + " is too small";
  }
  if (p.kv_heads > 0 ? p.q_heads % p.kv_heads != 0 : p.q_heads != 0) return "kv_heads does not divide q_heads";
  if (p.dtype == DType::kNone) return "dtype is none";
  if (p.score.bias.present != (p.score.bias_dtype != DType::kNone)) return "bias and bias_dtype disagree";
  if ((p.page > 0) != (p.pages > 0)) return "pages without keys";
  if (p.page > 0 && (p.page % kPageStep != 0 || p.kv_len % p.page != 0)) return "kv_len is not a multiple of page";
#define REQUESTED(operand, gradient, ...) || p.gradient
  if (p.page > 0 && (p.captured_gradients() JAX_FLASH_DERIVATIVES(REQUESTED))) return "pages have no gradients";
#undef REQUESTED
  if (p.page > 0 && p.tangent()) return "pages have no tangents";
  if (p.latent && p.v_dim > p.qk_dim) return "a latent is shorter than its value";
#define REQUESTED(operand, gradient, ...) || p.gradient
  if (p.latent && (p.captured_gradients() || p.tangent() JAX_FLASH_DERIVATIVES(REQUESTED))) {
    return "latent is only for the forward";
  }
#undef REQUESTED
#define CHECK(operand, gradient, ...)                                      \
  if (!operands::operand::Of(p).present) {                                 \
    if (p.gradient) return #gradient " without " #operand;                 \
    if (p.operand##_tangent) return #operand "_tangent without " #operand; \
  }
  JAX_FLASH_DERIVATIVES(CHECK)
#undef CHECK
  if (p.page > 0 && (p.score.bias.present || p.mask.array.present || p.mask.block_mask.present || p.mask.segment_ids ||
                     p.mask.ranges || p.dropout())) {
    return "pages are not supported with a bias, mask arrays, segment_ids, ranges or dropout";
  }
  if (p.mask.ranges && (p.mask.is_causal || p.mask.local_window_size.present() || p.mask.query_seq_lengths))
    return "ranges are not supported with is_causal, local_window_size or query_seq_lengths, which they contain";
  if (p.dropout_tiles && !p.dropout()) return "dropout_tiles without dropout";
  if (p.mask.ranges && !p.mask.key_value_seq_lengths) return "ranges without key_value_seq_lengths";
  for (const int64_t size : {p.mask.q_block, p.mask.kv_block}) {
    if (p.mask.block_mask.present ? size <= 0 || size % 16 != 0 : size != 0)
      return "a block size is not a multiple of 16";
  }
  if (p.mask.block_mask.present && std::min(p.mask.row_list_size, p.mask.column_list_size) < kListHeader) {
    return "a list of the block mask is too small";
  }
  for (const int64_t size :
       {p.mask.q_block, p.mask.kv_block, p.mask.element_masks, p.mask.row_list_size, p.mask.column_list_size}) {
    if (size > std::numeric_limits<int32_t>::max()) return "a size of the block mask has more than 31 bits";
  }
  const std::string too_large = "an array has more than 2^52 elements: ";
#define CHECK(type, name, dtype, dims, there)                                         \
  if (!FitsDims(dims, ExtentOf(there))) return #name " does not have the dims " dims; \
  if (!CanExist(p, dims, ExtentOf(there))) return too_large + #name;
  JAX_FLASH_OPERANDS(CHECK)
  JAX_FLASH_FORWARD_RESULTS(CHECK)
#undef CHECK
  if (p.captured.size() > kMaxCaptured) return "more than " + std::to_string(kMaxCaptured) + " captured arrays";
  for (const Captured& captured : p.captured) {
    if (!CanExist(p, captured)) return "a captured array has a size below 0, or more than 2^52 elements";
    if (captured.gradient && captured.type() != Type::f) return "a captured array of integers has no gradient";
  }
  if (p.drop_threshold > kMaxDropThreshold)
    return "drop_threshold is not in [0, " + std::to_string(kMaxDropThreshold) + "]";
  return "";
}

// Decodes the programs. Returns an error, or an empty string.
std::string DecodePrograms(Problem* p) {
  const auto decode = [p](const char* name, ProgramKind kind, Program* program) {
    const std::string wrong = DecodeProgram(kind, p->captured, program);
    return wrong.empty() ? "" : std::string(name) + ": " + wrong;
  };
  std::string wrong = decode("score_mod", ProgramKind::kScoreMod, &p->score.score_mod);
  if (wrong.empty()) wrong = decode("mask_mod", ProgramKind::kMaskMod, &p->mask.mask_mod);
  if (wrong.empty()) wrong = decode("score_grad", ProgramKind::kScoreGrad, &p->score.score_grad);
  if (wrong.empty() && p->score.score_grad.present() && !p->score.score_mod.present())
    wrong = "score_grad without score_mod";
  if (wrong.empty()) wrong = decode("score_tangent", ProgramKind::kScoreTangent, &p->score.score_tangent);
  if (wrong.empty() && p->score.score_tangent.present() && !p->score.score_mod.present())
    wrong = "score_tangent without score_mod";
  return wrong;
}

}  // namespace

int64_t Problem::size(char dim, const Extent& extent) const {
  if (dim == '1' || (dim == 'B' && !extent.batch) || (dim == 'N' && !extent.heads) || (dim == 'T' && !extent.rows) ||
      (dim == 'S' && !extent.columns)) {
    return 1;
  }
  const std::pair<char, int64_t> sizes[] = {{'B', batch},
                                            {'T', q_len},
                                            {'S', kv_len},
                                            {'N', q_heads},
                                            {'K', kv_heads},
                                            {'D', qk_dim},
                                            {'E', v_dim},
                                            {'R', mask.row_list_size},
                                            {'G', pages},
                                            {'A', page},
                                            {'C', mask.column_list_size},
                                            {'P', mask.element_masks},
                                            {'Q', mask.q_block}};
  for (const auto& [letter, size] : sizes) {
    if (letter == dim) return size;
  }
  if (dim == 'M') return pages_of_entry();
  if (dim == 'U') return block_rows();
  if (dim == 'V') return block_columns();
  if (dim == 'W') return element_words();
  if (dim == 'H') return (q_len + 15) / 16;
  if (dim == 'I') return (kv_len + 15) / 16;
  if (dim == 'X') return 2;
  throw std::logic_error("a dim that no array has");
}

int64_t Problem::elements(const char* dims, const Extent& extent) const {
  int64_t product = 1;
  for (; *dims; ++dims) product *= size(*dims, extent);
  return product;
}

Extent Problem::mask_mod_extent() const {
  const Program& mask_mod = mask.mask_mod;
  Extent extent = {mask_mod.present(), false, false, false, false};
  for (const Instruction& x : mask_mod.instructions) {
    const bool loads = x.array >= 0;
    extent.batch |= x.op == Op::batch || (x.op == Op::query && mask.query_offset) || (loads && captured[x.array].batch);
    extent.heads |= x.op == Op::head;
    extent.rows |= x.op == Op::query;
    extent.columns |= x.op == Op::key;
  }
  return extent;
}

bool Problem::tangent() const {
#define MOVES(operand, ...) || operand##_tangent
  return score.score_tangent.present() JAX_FLASH_DERIVATIVES(MOVES);
#undef MOVES
}

bool Problem::scores_move() const {
#define MOVES(operand, gradient, role, ...) || (role == Role::kScores && operand##_tangent)
  return score.score_tangent.present() JAX_FLASH_DERIVATIVES(MOVES);
#undef MOVES
}

bool Problem::needs_ds() const {
#define REQUESTED(operand, gradient, role, ...) || (role == Role::kScores && gradient)
  return captured_gradients() JAX_FLASH_DERIVATIVES(REQUESTED);
#undef REQUESTED
}

bool Problem::gradients_of_rows() const {
#define REQUESTED(operand, gradient, role, ...) || (role == Role::kOnceARow && gradient)
  return false JAX_FLASH_DERIVATIVES(REQUESTED);
#undef REQUESTED
}

const Captured* Problem::captured_arrays() const { return captured.data(); }
int64_t Problem::captured_count() const { return int64_t(captured.size()); }

std::string Decode(std::string_view text, Problem* problem) {
  *problem = Problem();
  bool seen[kFieldCount] = {};
  bool version_seen = false;
  for (bool more = !text.empty(); more;) {
    const size_t space = text.find(' ');
    const std::string_view entry = text.substr(0, space);
    more = space != text.npos;
    if (more) text.remove_prefix(space + 1);
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) return "problem: '" + std::string(entry) + "' is not name=value";
    const std::string_view name = entry.substr(0, equals), value = entry.substr(equals + 1);
    if (name == "version") {
      if (version_seen) return "problem: version appears twice";
      const std::string version = std::to_string(kProblemVersion);
      if (value != version) {
        return "problem: version " + std::string(value) + ", but this build reads version " + version;
      }
      version_seen = true;
      continue;
    }
    size_t i = 0;
    while (i < kFieldCount && kFields[i].name != name) ++i;
    if (i == kFieldCount) return "problem: unknown field '" + std::string(name) + "'";
    if (seen[i]) return "problem: " + std::string(name) + " appears twice";
    seen[i] = true;
    if (!std::visit([&](auto member) { return Parse(value, member(problem)); }, kFields[i].member)) {
      return "problem: cannot read " + std::string(entry);
    }
  }
  if (!version_seen) return "problem: version is missing";
  for (size_t i = 0; i < kFieldCount; ++i) {
    if (!seen[i]) return "problem: " + std::string(kFields[i].name) + " is missing";
  }
  std::string wrong = Check(problem);
  if (wrong.empty()) wrong = DecodePrograms(problem);
  return wrong.empty() ? "" : "problem: " + wrong;
}

std::vector<std::pair<std::string, std::string>> ProblemFields() {
  // The names of the types of Field::member.
  constexpr const char* kTypes[] = {"int",
                                    "float",
                                    "bool",
                                    "str",
                                    "Extent | None",
                                    "WindowSize",
                                    "tuple[Captured, ...]",
                                    "Program | None",
                                    "tuple[str, ...]",
                                    "tuple[str, ...]"};
  std::vector<std::pair<std::string, std::string>> fields;
  for (const Field& field : kFields) fields.emplace_back(field.name, kTypes[field.member.index()]);
  return fields;
}

}  // namespace jax_flash
