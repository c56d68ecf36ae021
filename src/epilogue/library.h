#pragma once

// Each epilogue, once. D is the output's type, Out the one that scaled_mm's own kernels write; a null bias adds
// nothing, a null zero point counts as 1.

#include <type_traits>

#include "epilogue/expr.h"

namespace epiloq::epilogue {

// The run-time operands, before any type of D is known.
struct Operands {
  float const* scale_a = nullptr;
  float const* scale_b = nullptr;
  void const* bias = nullptr;
  std::int32_t const* azp = nullptr;
  std::int32_t const* azp_adj = nullptr;
  bool scale_a_is_vector = false;
  bool scale_b_is_vector = false;
  bool azp_is_vector = false;
  bool is_bfloat16 = false;  // bias and D, where they are Half
  // Of a batch: from one product's scales to the next's; and what an int8 output is in units of.
  std::int64_t scale_a_batch = 0;
  std::int64_t scale_b_batch = 0;
  float const* scale_out = nullptr;

  // The operands of one product of a batch, for kernels that take one at a time.
  EPILOQ_HD Operands of_batch(std::int64_t batch) const {
    Operands operands = *this;
    operands.scale_a += batch * scale_a_batch;
    operands.scale_b += batch * scale_b_batch;
    return operands;
  }

  friend bool operator==(Operands const&, Operands const&) = default;
};

// The bias in float arithmetic, and a b + c rounded once to D.
template <class D>
EPILOQ_HD auto bias_of(Operands const& p) {
  Row<D> const bias{static_cast<D const*>(p.bias)};
  if constexpr (std::is_same_v<D, Half>) {
    return widen(bias, p.is_bfloat16);
  } else {
    return bias;
  }
}
template <class D, class A, class B, class C>
EPILOQ_HD auto rounded_fma(A a, B b, C c, Operands const& p) {
  if constexpr (std::is_same_v<D, Half>) {
    return narrow(fma<float>(a, b, c), p.is_bfloat16);
  } else {
    return fma<D, float>(a, b, c);
  }
}

// ScaledEpilogue and ScaledEpilogueBias: sa (sb acc) + bias
struct Scaled {
  using Out = Half;
  template <class D>
  EPILOQ_HD static auto make(Operands const& p) {
    Col<float> const scale_a{p.scale_a, p.scale_a_is_vector, 0, p.scale_a_batch};
    Row<float> const scale_b{p.scale_b, p.scale_b_is_vector, 0, p.scale_b_batch};
    return rounded_fma<D>(scale_a, mul<float>(scale_b, Acc{}), bias_of<D>(p), p);
  }
};

// ScaledEpilogueAzp (azp null: azp_adj was multiplied beforehand) and ScaledEpilogueAzpPerToken:
// sa (sb (acc - azp azp_adj)) + bias, the difference exact in int32
struct ScaledAzp {
  using Out = Half;
  template <class D>
  EPILOQ_HD static auto make(Operands const& p) {
    Col<float> const scale_a{p.scale_a, p.scale_a_is_vector};
    Row<float> const scale_b{p.scale_b, p.scale_b_is_vector};
    Col<std::int32_t> const azp{p.azp, p.azp_is_vector, 1};
    Row<std::int32_t> const azp_adj{p.azp_adj};
    auto const centred = sub<float, std::int32_t>(Acc{}, mul<std::int32_t>(azp, azp_adj));
    return rounded_fma<D>(scale_a, mul<float>(scale_b, centred), bias_of<D>(p), p);
  }
};

// sa (sb acc) / so to an integer: ties to even, saturated.
struct Requantized {
  using Out = std::int8_t;
  template <class D>
  EPILOQ_HD static auto make(Operands const& p) {
    Col<float> const scale_a{p.scale_a, p.scale_a_is_vector, 0, p.scale_a_batch};
    Row<float> const scale_b{p.scale_b, p.scale_b_is_vector, 0, p.scale_b_batch};
    Row<float> const scale_out{p.scale_out, false};
    return div<D, float>(mul<float>(scale_a, mul<float>(scale_b, Acc{})), scale_out);
  }
};

// Of products that requantise: min(max(scale acc + bias, lo), hi) in the arithmetic of Real.
struct Restored {
  template <class Real>
  EPILOQ_HD static auto make(float const* scale, bool scale_is_vector, float const* bias, float lo, float hi) {
    auto const real = fma<Real>(Row<float>{scale, scale_is_vector}, Acc{}, Row<float>{bias});
    return clamp<Real>(real, Scalar<float>{lo}, Scalar<float>{hi});
  }
};

}  // namespace epiloq::epilogue
