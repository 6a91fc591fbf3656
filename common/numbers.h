// Parsing of numbers that Python writes, in any locale. Each function returns whether the whole text is valid.
#pragma once

#include <cstdint>
#include <string_view>

namespace jax_flash {

bool ParseInteger(std::string_view text, int64_t* value);
// A finite number: "0.5", "1e-07".
bool ParseDecimal(std::string_view text, double* value);
// The format of float.hex: "0x1.8p+3", "-inf", "nan".
bool ParseHexFloat(std::string_view text, double* value);

}  // namespace jax_flash
