// What can be said of a score program's values before it runs.
#pragma once

#include <cstdint>
#include <vector>

#include "common/problem.h"
#include "common/ranges.h"

namespace jax_flash {

// How much an int, which may wrap around, differs from row to row and from key to key.
struct Steps {
  uint32_t row = 0, key = 0;

  bool operator==(const Steps& other) const { return row == other.row && key == other.key; }
};

// What a value differs with: nothing, the query, the key, the difference of both; or in no simpler way than from entry
// to entry.
enum class SumKind { kNothing, kRows, kKeys, kDiagonals, kEntries };

struct Facts {
  // The range of an int, an unsigned int or a truth value at entries within T and S, and at every entry of a tile. With
  // a query offset, a score program's entries are within if queries have positions of keys.
  Range within = EveryValue(Type::i), anywhere = within;

  // Of an int: the operand that it is the same as, within; -1 for none.
  int same = -1;

  // Of an int: is it so many times the query and the key, plus something that is the same for all entries?
  bool linear = false;
  Steps steps;

  // Is it such an int, and one that floats have exactly? Of a float: is it one of these times something, plus
  // something, which are the same for all entries? Then the steps are that int's.
  bool ramp = false;

  // Of a value, and of the place that an accumulation adds to: what it differs with at most.
  SumKind sum_kind = SumKind::kNothing;
};

// Of every value of a program.
std::vector<Facts> FactsOf(const Problem& problem, const Program& program);

}  // namespace jax_flash
