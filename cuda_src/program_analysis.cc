#include "cuda_src/program_analysis.h"

#include <algorithm>

#include "cuda_src/contract.h"

namespace jax_flash {
namespace {

constexpr Range kExact = {-(1 << 24), 1 << 24};  // integers that a float represents exactly

// The range of a value, given the ranges of queries, keys and operands.
Range KnownRange(const Instruction& x, const Range& query, const Range& key, const Range* operands) {
  if (x.op == Op::query) return query;
  if (x.op == Op::key) return key;
  if (x.type == Type::f) return EveryValue(Type::f);  // a GPU may round a product and a sum only once
  return RangeOf<float>(x, operands);
}

// The number of the operand that the value always equals, given the operands' ranges; -1 if none.
int SameAs(const Instruction& x, const Range& a, const Range& b) {
  if (x.op == Op::select_i && a == kTrue) return 1;
  if (x.op == Op::select_i && a == kFalse) return 2;
  if (x.op == Op::max_i && a.low >= b.high) return 0;
  if (x.op == Op::max_i && b.low >= a.high) return 1;
  if (x.op == Op::min_i && a.high <= b.low) return 0;
  if (x.op == Op::min_i && b.high <= a.low) return 1;
  return -1;
}

bool IsUniform(const Instruction& x) { return !x.rows && !x.columns; }

// Determines whether an int is linear, and its steps.
void FindSteps(const Instruction& x, const Facts& a, const Facts& b, Facts* facts) {
  facts->linear = IsUniform(x) || x.op == Op::query || x.op == Op::key;
  if (x.op == Op::query) facts->steps = {1, 0};
  if (x.op == Op::key) facts->steps = {0, 1};
  if (x.op == Op::add_i) facts->steps = {a.steps.row + b.steps.row, a.steps.key + b.steps.key};
  if (x.op == Op::sub_i) facts->steps = {a.steps.row - b.steps.row, a.steps.key - b.steps.key};
  if (x.op == Op::add_i || x.op == Op::sub_i) facts->linear = a.linear && b.linear;
  facts->ramp = facts->linear && !IsUniform(x) && facts->anywhere.IsWithin(kExact);
}

// Determines whether a float is a ramp, and its steps.
void FindRamp(const Instruction& x, const Facts& a, const Facts& b, bool a_uniform, bool b_uniform, Facts* facts) {
  const bool one = (a.ramp && b_uniform) || (a_uniform && b.ramp);
  if (x.op == Op::cast_i_f || x.op == Op::neg_f) facts->ramp = a.ramp;
  if (x.op == Op::mul_f) facts->ramp = one;
  if (x.op == Op::add_f || x.op == Op::sub_f) facts->ramp = one || (a.ramp && b.ramp && a.steps == b.steps);
  facts->steps = a.ramp ? a.steps : b.steps;
}

// The kind of a sum whose address is an int with these steps.
SumKind SumKindOf(const Steps& steps) {
  if (steps == Steps()) return SumKind::kNothing;
  if (steps.key == 0) return SumKind::kRows;
  if (steps.row == 0) return SumKind::kKeys;
  return steps.row + steps.key == 0 ? SumKind::kDiagonals : SumKind::kEntries;
}

// The kind of a function of two values of kinds `a` and `b`.
SumKind Join(SumKind a, SumKind b) {
  if (a == SumKind::kNothing || a == b) return b;
  return b == SumKind::kNothing ? a : SumKind::kEntries;
}

}  // namespace

std::vector<Facts> FactsOf(const Problem& p, const Program& program) {
  const bool for_every_entry = &program == &p.mask.mask_mod;
  const int64_t rows = p.padded_q_len() + kMaxStep, keys = p.padded_kv_len() + kMaxStep;
  Range query = EveryValue(Type::i), key = query, query_anywhere = query, key_anywhere = query;
  if (!p.origin) {
    key = {0, double(p.kv_len - 1)};
    key_anywhere = {0, double(keys - 1)};
    if (!p.mask.query_offset) {
      query = {0, double(p.q_len - 1)};
      query_anywhere = {0, double(rows - 1)};
    } else if (!for_every_entry) {
      query = key;
    }
  }
  std::vector<Facts> all;
  for (const Instruction& x : program.instructions) {
    const auto facts_of = [&](int i) { return i < x.count ? all[x.operands[i]] : Facts(); };
    const auto is_uniform = [&](int i) { return i < x.count && IsUniform(program.instructions[x.operands[i]]); };
    const Facts a = facts_of(0), b = facts_of(1), c = facts_of(2);
    const Range within[] = {a.within, b.within, c.within}, anywhere[] = {a.anywhere, b.anywhere, c.anywhere};
    Facts facts;
    facts.same = SameAs(x, a.within, b.within);
    facts.within = facts.same >= 0 ? within[facts.same] : KnownRange(x, query, key, within);
    facts.anywhere = KnownRange(x, query_anywhere, key_anywhere, anywhere);
    if (x.type == Type::i) FindSteps(x, a, b, &facts);
    if (x.type == Type::f) FindRamp(x, a, b, is_uniform(0), is_uniform(1), &facts);
    if (x.op == Op::score || x.op == Op::cotangent || x.op == Op::tangent) facts.sum_kind = SumKind::kEntries;
    for (int i = 0; i < x.count - (x.op == Op::accumulate); ++i)
      facts.sum_kind = Join(facts.sum_kind, facts_of(i).sum_kind);
    if (facts.linear) facts.sum_kind = SumKindOf(facts.steps);
    all.push_back(facts);
  }
  return all;
}

}  // namespace jax_flash
