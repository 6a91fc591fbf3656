#include "common/numbers.h"

#include <locale.h>
#include <stdlib.h>

#include <charconv>
#include <cmath>
#include <string>

namespace jax_flash {
namespace {

// strtod accepts more than Python writes, so only these characters are allowed.
bool ParseFloat(std::string_view text, const char* characters, double* value) {
  // A locale with decimal commas must not change the result. Streams do not work in every process with more than one
  // C++ standard library.
  static const locale_t locale = newlocale(LC_ALL_MASK, "C", nullptr);
  const std::string copy(text);
  char* end = nullptr;
  *value = strtod_l(copy.c_str(), &end, locale);
  return text.find_first_not_of(characters) == text.npos && !copy.empty() && *end == '\0';
}

}  // namespace

bool ParseInteger(std::string_view text, int64_t* value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && stop == end;
}

bool ParseDecimal(std::string_view text, double* value) {
  return ParseFloat(text, "0123456789.e+-", value) && std::isfinite(*value);
}

bool ParseHexFloat(std::string_view text, double* value) {
  const bool named = text == "inf" || text == "-inf" || text == "nan";
  return ParseFloat(text, named ? "-infa" : "0123456789abcdefxp.+-", value);
}

}  // namespace jax_flash
