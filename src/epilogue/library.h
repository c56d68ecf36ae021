#pragma once

// Each epilogue, once, and the tables from which CMake, dispatch and the CPU backend derive what they compile and run.
//
// An epilogue consists of
//   Out            the type of D that scaled_mm's own kernels write (Half: float16 or bfloat16)
//   kHasZeroPoint  whether it reads azp and azp_adj
//   applies(p)     whether it is the one for these operands
//   make<D>(p)     its expression, D being the type of the output
// A null bias adds nothing, a null zero point counts as 1.

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
  // Of a batch, the distance between two products' scales; and the unit of an int8 output.
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
  static constexpr bool kHasZeroPoint = false;
  static bool applies(Operands const&) { return true; }

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
  static constexpr bool kHasZeroPoint = true;
  static bool applies(Operands const& p) { return p.azp_adj != nullptr; }

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
  static constexpr bool kHasZeroPoint = false;
  static bool applies(Operands const& p) { return p.scale_out != nullptr; }

  template <class D>
  EPILOQ_HD static auto make(Operands const& p) {
    Col<float> const scale_a{p.scale_a, p.scale_a_is_vector, 0, p.scale_a_batch};
    Row<float> const scale_b{p.scale_b, p.scale_b_is_vector, 0, p.scale_b_batch};
    Row<float> const scale_out{p.scale_out, false};
    return div<D, float>(mul<float>(scale_a, mul<float>(scale_b, Acc{})), scale_out);
  }
};

// The epilogues of scaled_mm's products by type of A and B and of D. A call uses the first one that applies to its
// operands. One line each: cmake/kernels.cmake reads them.
template <class... Epilogues>
struct List {};
using Int8Epilogues = List<ScaledAzp, Scaled>;
using Int8OutEpilogues = List<Requantized>;
using Float8Epilogues = List<Scaled>;

// Returns f.operator()<Epilogue>() of the first epilogue of a list that applies, or else of the last one.
template <class First, class... Rest, class F>
decltype(auto) with_epilogue(List<First, Rest...>, Operands const& p, F const& f) {
  if constexpr (sizeof...(Rest) > 0) {
    if (!First::applies(p)) return with_epilogue(List<Rest...>{}, p, f);
  }
  return f.template operator()<First>();
}

// Epilogue of requantising products: min(max(scale acc + bias, lo), hi) in the arithmetic of Real.
struct Restored {
  template <class Real>
  EPILOQ_HD static auto make(float const* scale, bool scale_is_vector, float const* bias, float lo, float hi) {
    auto const real = fma<Real>(Row<float>{scale, scale_is_vector}, Acc{}, Row<float>{bias});
    return clamp<Real>(real, Scalar<float>{lo}, Scalar<float>{hi});
  }
};

}  // namespace epiloq::epilogue
