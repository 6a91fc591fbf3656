// Static analysis of a score program's values.
#pragma once

#include <cstdint>
#include <vector>

#include "common/problem.h"
#include "common/ranges.h"

namespace jax_flash {

// The increments of an int between rows and between keys. The int may wrap around.
struct Steps {
  uint32_t row = 0, key = 0;

  bool operator==(const Steps& other) const { return row == other.row && key == other.key; }
};

// The indices that a value depends on: none, the query, the key, or query - key. kEntries: both in any other way.
enum class SumKind { kNothing, kRows, kKeys, kDiagonals, kEntries };

struct Facts {
  // The range of an int, an unsigned int or a truth value: `within` for entries within T and S, `anywhere` for every
  // entry of a tile. With a query offset, `within` also requires that the queries' positions are within the keys.
  Range within = EveryValue(Type::i), anywhere = within;

  // For ints: the number of the operand that it always equals within T and S; -1 if none.
  int same = -1;

  // For ints: is it query * steps.row + key * steps.key plus a constant over entries?
  bool linear = false;
  Steps steps;

  // For ints: is it linear and exactly representable as a float? For floats: is it such an int times a constant, plus a
  // constant? Then `steps` belongs to that int.
  bool ramp = false;

  // The indices that the value, or the address of an accumulation, may depend on.
  SumKind sum_kind = SumKind::kNothing;
};

// The facts of every value of a program.
std::vector<Facts> FactsOf(const Problem& problem, const Program& program);

}  // namespace jax_flash
