// The instructions of score programs (common/program.h): their text, the types of their values, and what they compute.
// These tables define parsing, checks and evaluation.
#pragma once

#include <cstdint>

namespace jax_flash {

constexpr int kMaxCaptured = 32;  // arrays that the programs of a problem capture

// The type of a value: the accumulation dtype, a signed or unsigned 32-bit integer, or a truth value. n: no value.
enum class Type : uint8_t { f, i, u, b, n };

// The inputs of a program: INPUT(name, type, rows, columns). Does it differ between the rows, and between the columns,
// of a tile?
#define JAX_FLASH_INPUTS(INPUT)   \
  INPUT(score, f, true, true)     \
  INPUT(cotangent, f, true, true) \
  INPUT(tangent, f, true, true)   \
  INPUT(batch, i, false, false)   \
  INPUT(head, i, false, false)    \
  INPUT(query, i, true, false)    \
  INPUT(key, i, false, true)

// TYPED(type): instructions that exist for every type, const and load.
#define JAX_FLASH_TYPES(TYPED) TYPED(f) TYPED(i) TYPED(u) TYPED(b)

// Functions of up to three values: OP(name, text, result, x, y, z, value). `value` is an expression in functions that
// each evaluator defines (for example cpu_src/lanes.h).
#define JAX_FLASH_FLOAT_OPS(OP)                                                            \
  OP(add_f, "add.f", f, f, f, n, x + y)                                                    \
  OP(sub_f, "sub.f", f, f, f, n, x - y)                                                    \
  OP(mul_f, "mul.f", f, f, f, n, (x * y))                                                  \
  OP(div_f, "div.f", f, f, f, n, x / y)                                                    \
  OP(rem_f, "rem.f", f, f, f, n, Fmod(x, y))                                               \
  OP(min_f, "min.f", f, f, f, n, ((x < y) | (x != x)) ? x : y)                             \
  OP(max_f, "max.f", f, f, f, n, ((x > y) | (x != x)) ? x : y)                             \
  OP(pow_f, "pow.f", f, f, f, n, Pow(x, y))                                                \
  OP(atan2_f, "atan2.f", f, f, f, n, Atan2(x, y))                                          \
  OP(neg_f, "neg.f", f, f, n, n, -x)                                                       \
  OP(abs_f, "abs.f", f, f, n, n, Abs(x))                                                   \
  OP(sign_f, "sign.f", f, f, n, n, x > 0 ? Broadcast(A(1)) : x < 0 ? Broadcast(A(-1)) : x) \
  OP(exp_f, "exp.f", f, f, n, n, UnboundedExp(x))                                          \
  OP(exp2_f, "exp2.f", f, f, n, n, Exp2(x))                                                \
  OP(log_f, "log.f", f, f, n, n, Log(x))                                                   \
  OP(log1p_f, "log1p.f", f, f, n, n, Log1p(x))                                             \
  OP(expm1_f, "expm1.f", f, f, n, n, Expm1(x))                                             \
  OP(tanh_f, "tanh.f", f, f, n, n, Tanh<A>(x))                                             \
  OP(logistic_f, "logistic.f", f, f, n, n, 1 / (UnboundedExp(-x) + 1))                     \
  OP(erf_f, "erf.f", f, f, n, n, Erf(x))                                                   \
  OP(erfc_f, "erfc.f", f, f, n, n, Erfc(x))                                                \
  OP(sin_f, "sin.f", f, f, n, n, Sin(x))                                                   \
  OP(cos_f, "cos.f", f, f, n, n, Cos(x))                                                   \
  OP(sqrt_f, "sqrt.f", f, f, n, n, Sqrt(x))                                                \
  OP(rsqrt_f, "rsqrt.f", f, f, n, n, 1 / Sqrt(x))                                          \
  OP(floor_f, "floor.f", f, f, n, n, Floor(x))                                             \
  OP(ceil_f, "ceil.f", f, f, n, n, -Floor(-x))                                             \
  OP(round_f, "round.f", f, f, n, n, RoundHalfAway(x))                                     \
  OP(rint_f, "rint.f", f, f, n, n, RoundHalfEven(x))                                       \
  OP(finite_f, "finite.f", b, f, n, n, Truth(x - x == 0))                                  \
  OP(round_to_bf16, "round_to.bfloat16", f, f, n, n, RoundTo<BF16>(x))                     \
  OP(round_to_f16, "round_to.float16", f, f, n, n, RoundTo<F16>(x))                        \
  OP(round_to_f32, "round_to.float32", f, f, n, n, RoundTo<float>(x))

// Functions of integers of type T, i or u. Bits(x) is unsigned, so it may wrap around.
#define JAX_FLASH_INTEGER_OPS(OP, T)                                              \
  OP(add_##T, "add." #T, T, T, T, n, Bits(x) + Bits(y))                           \
  OP(sub_##T, "sub." #T, T, T, T, n, Bits(x) - Bits(y))                           \
  OP(mul_##T, "mul." #T, T, T, T, n, Bits(x) * Bits(y))                           \
  OP(div_##T, "div." #T, T, T, T, n, Quotient(x, y))                              \
  OP(rem_##T, "rem." #T, T, T, T, n, Bits(x) - Bits(y) * Bits(Quotient(x, y)))    \
  OP(min_##T, "min." #T, T, T, T, n, x < y ? x : y)                               \
  OP(max_##T, "max." #T, T, T, T, n, x > y ? x : y)                               \
  OP(and_##T, "and." #T, T, T, T, n, x& y)                                        \
  OP(or_##T, "or." #T, T, T, T, n, x | y)                                         \
  OP(xor_##T, "xor." #T, T, T, T, n, x ^ y)                                       \
  OP(shl_##T, "shl." #T, T, T, T, n, ShiftLeft(x, y))                             \
  OP(shr_##T, "shr." #T, T, T, T, n, ShiftRight(x, y))                            \
  OP(neg_##T, "neg." #T, T, T, n, n, 0 - Bits(x))                                 \
  OP(abs_##T, "abs." #T, T, T, n, n, x < 0 ? 0 - Bits(x) : Bits(x))               \
  OP(sign_##T, "sign." #T, T, T, n, n, x > 0 ? x - x + 1 : x < 0 ? x - x - 1 : x) \
  OP(not_##T, "not." #T, T, T, n, n, ~x)                                          \
  OP(popcount_##T, "popcount." #T, T, T, n, n, CountOnes(Bits(x)))                \
  OP(clz_##T, "clz." #T, T, T, n, n, CountLeadingZeros(Bits(x)))                  \
  JAX_FLASH_COMPARISONS(OP, T, )

// Functions of truth values, with all bits set or none.
#define JAX_FLASH_BOOL_OPS(OP)          \
  OP(and_b, "and.b", b, b, b, n, x& y)  \
  OP(or_b, "or.b", b, b, b, n, x | y)   \
  OP(xor_b, "xor.b", b, b, b, n, x ^ y) \
  OP(not_b, "not.b", b, b, n, n, ~x)    \
  OP(eq_b, "eq.b", b, b, b, n, x == y)  \
  OP(ne_b, "ne.b", b, b, b, n, x != y)

#define JAX_FLASH_COMPARISONS(OP, T, truth)       \
  OP(eq_##T, "eq." #T, b, T, T, n, truth(x == y)) \
  OP(ne_##T, "ne." #T, b, T, T, n, truth(x != y)) \
  OP(lt_##T, "lt." #T, b, T, T, n, truth(x < y))  \
  OP(le_##T, "le." #T, b, T, T, n, truth(x <= y)) \
  OP(gt_##T, "gt." #T, b, T, T, n, truth(x > y))  \
  OP(ge_##T, "ge." #T, b, T, T, n, truth(x >= y))

// Functions between types, and functions that exist for every type.
#define JAX_FLASH_MIXED_OPS(OP)                            \
  OP(select_f, "select.f", f, b, f, f, OfTruth(x) ? y : z) \
  OP(select_i, "select.i", i, b, i, i, x ? y : z)          \
  OP(select_u, "select.u", u, b, u, u, x ? y : z)          \
  OP(select_b, "select.b", b, b, b, b, x ? y : z)          \
  OP(cast_f_i, "cast.f.i", i, f, n, n, ToSigned(x))        \
  OP(cast_f_u, "cast.f.u", u, f, n, n, ToUnsigned(x))      \
  OP(cast_f_b, "cast.f.b", b, f, n, n, Truth(x != 0))      \
  OP(cast_i_f, "cast.i.f", f, i, n, n, ToFloats(x))        \
  OP(cast_i_u, "cast.i.u", u, i, n, n, x)                  \
  OP(cast_i_b, "cast.i.b", b, i, n, n, x != 0)             \
  OP(cast_u_f, "cast.u.f", f, u, n, n, ToFloats(x))        \
  OP(cast_u_i, "cast.u.i", i, u, n, n, x)                  \
  OP(cast_u_b, "cast.u.b", b, u, n, n, x != 0)             \
  OP(cast_b_f, "cast.b.f", f, b, n, n, ToFloats(x & 1))    \
  OP(cast_b_i, "cast.b.i", i, b, n, n, x & 1)              \
  OP(cast_b_u, "cast.b.u", u, b, n, n, x & 1)

#define JAX_FLASH_OPS(OP)             \
  JAX_FLASH_FLOAT_OPS(OP)             \
  JAX_FLASH_COMPARISONS(OP, f, Truth) \
  JAX_FLASH_INTEGER_OPS(OP, i)        \
  JAX_FLASH_INTEGER_OPS(OP, u)        \
  JAX_FLASH_BOOL_OPS(OP)              \
  JAX_FLASH_MIXED_OPS(OP)

enum class Op : uint8_t {
#define JAX_FLASH_INPUT(name, ...) name,
#define JAX_FLASH_TYPED(T) const_##T, load_##T,
#define JAX_FLASH_OP(name, ...) name,
  JAX_FLASH_INPUTS(JAX_FLASH_INPUT) JAX_FLASH_TYPES(JAX_FLASH_TYPED) JAX_FLASH_OPS(JAX_FLASH_OP) accumulate,
  result,
#undef JAX_FLASH_INPUT
#undef JAX_FLASH_TYPED
#undef JAX_FLASH_OP
};

}  // namespace jax_flash
