// Statistics of a row with a sink, and the sink's effect on gradients and tangents. A sink is a logit that joins the
// denominator of the softmax, and has no value.
#pragma once

#include "cpu_src/scores.h"

namespace jax_flash::JAX_FLASH_ISA {

// m and l with the sink as one more score. P = exp(S - m) / l unless the row is empty.
template <typename A>
struct WithSink {
  A m, l;
  A alpha = 1;  // exp(m without the sink - m)
  A sink = 0;   // P of the sink

  // Takes m and l without the sink.
  WithSink(const Problem& p, const Operands& in, int64_t b, int64_t n, A m, A l) : m(m), l(l) {
    if (!p.sinks.present || l == 0) return;
    const A z = static_cast<const A*>(in.sinks)[HeadOffset(p, p.sinks, b, n).At(0, 0)];
    if (z > m) this->m = z;
    Vec<A> exponents = Broadcast(z - this->m);
    exponents[0] = m - this->m;
    const Vec<A> powers = Exp<A>(exponents);
    alpha = powers[0];
    this->l = alpha * l + powers[1];
    sink = powers[1] / this->l;
  }

  // The growth of exp(m) l through the sink. If it overflows, all P are 0.
  A Growth(A l_without) const {
    constexpr A least = sizeof(A) == 8 ? A(0x1p-900) : A(0x1p-115);
    return sink == 0 ? 1 : l / (l_without * (alpha < least ? least : alpha));
  }

  // The sink's term of μ in a tangent, relative to the row's reference.
  A TermOfMu(const Problem& p, const Tangents& given, int64_t b, int64_t n, A reference) const {
    if (sink == 0) return 0;
    const A z_tangent =
        p.sinks_tangent ? static_cast<const A*>(given.sinks_tangent)[HeadOffset(p, p.sinks, b, n).At(0, 0)] : A(0);
    return sink * (z_tangent - reference);
  }

  // Writes the contribution of this row of [B, N, T] to the gradient of the sinks, where `product` is dO · O.
  void StoreGradient(const Problem& p, const BackwardResults& out, int64_t row, A product) const {
    if (p.dsinks) static_cast<A*>(out.dsinks)[row] = -sink * product;
  }
};

}  // namespace jax_flash::JAX_FLASH_ISA
