#include "common/problem.h"

#include <locale.h>
#include <stdlib.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <variant>

namespace jax_flash {
namespace {

// A field of the text: its name and where its value goes. The type of the value says how it is read.
struct Field {
  std::string_view name;
  std::variant<int64_t Problem::*, double Problem::*, bool Problem::*, DType Problem::*, Extent Problem::*> member;
};

#define ENTRY(type, name, value) {#name, &Problem::name},
constexpr Field kFields[] = {JAX_FLASH_PROBLEM(ENTRY)};
#undef ENTRY
constexpr size_t kFieldCount = sizeof(kFields) / sizeof(kFields[0]);
constexpr std::string_view kVersion = "5";

bool Parse(std::string_view text, int64_t* value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && stop == end;
}

bool Parse(std::string_view text, double* value) {
  // A locale with decimal commas must not change what we read. (No streams: they do not work in every process that has
  // more than one C++ standard library.)
  static const locale_t locale = newlocale(LC_ALL_MASK, "C", nullptr);
  const std::string copy(text);
  char* end = nullptr;
  *value = strtod_l(copy.c_str(), &end, locale);
  return !copy.empty() && *end == '\0' && std::isfinite(*value);
}

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

// "none", or the four letters of [B, N, T, S] with "1" in place of a broadcast dimension's.
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

// Whether an array of these sizes can be: what is computed of them, with padding and in bytes, then has 64 bits. A size
// of 0 counts as 1, for what is computed of the others alone.
bool CanBe(std::initializer_list<int64_t> sizes) {
  constexpr double kMostElements = 0x1p52;
  double elements = 1;
  for (const int64_t size : sizes) elements *= double(std::max<int64_t>(size, 1));
  return elements <= kMostElements;
}

// Likewise of an operand that may be broadcast.
bool CanBe(const Problem& p, const Extent& extent, int64_t rows, int64_t columns) {
  return CanBe(
      {extent.batch ? p.batch : 1, extent.heads ? p.q_heads : 1, extent.rows ? rows : 1, extent.columns ? columns : 1});
}

// What is wrong with the values, each of which could be read.
std::string Check(const Problem& p) {
  for (const int64_t size : {p.batch, p.q_len, p.kv_len, p.q_heads, p.kv_heads, p.qk_dim, p.v_dim}) {
    if (size < 0) return "a size is negative";
  }
  if (!CanBe({p.batch, p.q_len, p.q_heads, std::max(p.qk_dim, p.v_dim)}) ||
      !CanBe({p.batch, p.kv_len, p.kv_heads, std::max(p.qk_dim, p.v_dim)}) || !CanBe(p, p.bias, p.q_len, p.kv_len) ||
      !CanBe(p, p.mask, p.q_len, p.kv_len)) {
    return "an array has more than 2^52 elements";
  }
  if (p.kv_heads > 0 ? p.q_heads % p.kv_heads != 0 : p.q_heads != 0) return "kv_heads does not divide q_heads";
  if (p.dtype == DType::kNone) return "dtype is none";
  if (p.bias.present != (p.bias_dtype != DType::kNone)) return "bias and bias_dtype disagree";
  if (p.dbias && !p.bias.present) return "dbias without a bias";
  if (!(p.soft_cap >= 0)) return "soft_cap is negative";
  if (p.window_left < -1 || p.window_right < -1) return "a window is negative";
  for (const int64_t size : {p.q_block, p.kv_block}) {
    if (p.block_mask.present ? size <= 0 || size % 16 != 0 : size != 0) return "a block size is no multiple of 16";
  }
  const int64_t least = p.block_mask.present ? 2 : 0;  // a list has an index and a count
  if (p.element_masks < 0 || p.row_list < least || p.column_list < least)
    return "a size of the block mask is too small";
  for (const int64_t size : {p.q_block, p.kv_block, p.element_masks, p.row_list, p.column_list}) {
    if (size > std::numeric_limits<int32_t>::max()) return "a size of the block mask has more than 31 bits";
  }
  if (p.block_mask.present && !(CanBe(p, p.block_mask, p.block_rows(), std::max(p.block_columns(), p.row_list)) &&
                                CanBe(p, p.block_mask, p.column_list, p.block_columns()) &&
                                CanBe({p.batch, p.element_masks, p.q_block, p.element_words()}))) {
    return "an array of the block mask has more than 2^52 elements";
  }
  if (p.drop_threshold < 0 || p.drop_threshold > 32640) return "drop_threshold is not in [0, 32640]";
  return "";
}

}  // namespace

std::string Decode(std::string_view text, Problem* problem) {
  *problem = Problem();
  bool seen[kFieldCount] = {};
  bool version_seen = false;
  while (!text.empty()) {
    const std::string_view entry = text.substr(0, text.find(' '));
    text.remove_prefix(entry.size() < text.size() ? entry.size() + 1 : entry.size());
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) return "problem: '" + std::string(entry) + "' is not name=value";
    const std::string_view name = entry.substr(0, equals), value = entry.substr(equals + 1);
    if (name == "version") {
      if (version_seen) return "problem: version is there twice";
      if (value != kVersion) {
        return "problem: version " + std::string(value) + ", but this build reads version " + std::string(kVersion);
      }
      version_seen = true;
      continue;
    }
    size_t i = 0;
    while (i < kFieldCount && kFields[i].name != name) ++i;
    if (i == kFieldCount) return "problem: unknown field '" + std::string(name) + "'";
    if (seen[i]) return "problem: " + std::string(name) + " is there twice";
    seen[i] = true;
    if (!std::visit([&](auto member) { return Parse(value, &(problem->*member)); }, kFields[i].member)) {
      return "problem: cannot read " + std::string(entry);
    }
  }
  if (!version_seen) return "problem: version is missing";
  for (size_t i = 0; i < kFieldCount; ++i) {
    if (!seen[i]) return "problem: " + std::string(kFields[i].name) + " is missing";
  }
  const std::string wrong = Check(*problem);
  return wrong.empty() ? "" : "problem: " + wrong;
}

std::vector<std::pair<std::string, std::string>> ProblemFields() {
  constexpr const char* kTypes[] = {"int", "float", "bool", "str", "Extent | None"};  // of Field::member
  std::vector<std::pair<std::string, std::string>> fields;
  for (const Field& field : kFields) fields.emplace_back(field.name, kTypes[field.member.index()]);
  return fields;
}

}  // namespace jax_flash
