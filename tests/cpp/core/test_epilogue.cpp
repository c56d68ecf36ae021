// Epilogues whose 16-bit format is known at run time, beside those of a type, on the host.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "check.h"
#include "core/half.h"
#include "epilogue/eval.h"
#include "epilogue/library.h"

namespace {

namespace ep = epiloq::epilogue;

float widened(std::uint16_t bits, bool is_bfloat16) {
  return is_bfloat16 ? epiloq::float_of_bfloat16(bits) : epiloq::float_of_float16(bits);
}
std::uint16_t narrowed(float x, bool is_bfloat16) {
  return is_bfloat16 ? epiloq::bfloat16_of_float(x) : epiloq::float16_of_float(x);
}

void every_half_is_widened_and_comes_back() {
  for (bool is_bfloat16 : {false, true}) {
    for (unsigned bits = 0; bits < 65536; ++bits) {
      ep::Half const half{static_cast<std::uint16_t>(bits)};
      auto const wide = ep::widen(ep::Row<ep::Half>{&half, false}, is_bfloat16);
      float const x = ep::eval(wide, 0, 0, 5), expected = widened(half.bits, is_bfloat16);
      CHECK(x == expected || (std::isnan(x) && std::isnan(expected)));
      ep::Half const back = ep::eval(ep::narrow(wide, is_bfloat16), 0, 0, 5);
      CHECK(back.bits == half.bits || (std::isnan(x) && std::isnan(widened(back.bits, is_bfloat16))));
    }
  }
}

// Of random operands: D as a Half is D as a float, rounded once; so it is at a column.
template <class Epilogue>
void halves_are_rounded_floats(std::mt19937& random) {
  constexpr int kColumns = 7;
  std::uniform_real_distribution<float> real(-2.f, 2.f);
  std::uniform_int_distribution<std::int32_t> integer(-(1 << 20), 1 << 20);
  for (int trial = 0; trial < 2000; ++trial) {
    bool const is_bfloat16 = random() % 2 == 0, has_bias = random() % 4 != 0;
    float const scale_a = std::ldexp(real(random), static_cast<int>(random() % 24) - 16);
    float scale_b[kColumns], bias[kColumns];
    std::uint16_t bias_bits[kColumns];
    std::int32_t azp_adj[kColumns];
    std::int32_t const azp = integer(random) % 128;
    for (int n = 0; n < kColumns; ++n) {
      scale_b[n] = real(random), azp_adj[n] = integer(random);
      bias_bits[n] = narrowed(1000 * real(random), is_bfloat16);
      bias[n] = widened(bias_bits[n], is_bfloat16);
    }
    ep::Operands operands;
    operands.scale_a = &scale_a, operands.scale_b = scale_b, operands.scale_b_is_vector = true;
    operands.azp = &azp, operands.azp_adj = azp_adj, operands.is_bfloat16 = is_bfloat16;
    ep::Operands of_float = operands;
    if (has_bias) operands.bias = bias_bits, of_float.bias = bias;
    auto const halves = Epilogue::template make<ep::Half>(operands);
    auto const floats = Epilogue::template make<float>(of_float);
    for (int n = 0; n < kColumns; ++n) {
      std::int32_t const acc = integer(random);
      std::uint16_t const expected = narrowed(ep::eval(floats, acc, 0, n), is_bfloat16);
      CHECK_EQUAL(ep::eval(halves, acc, 0, n).bits, expected);
      CHECK_EQUAL(ep::eval(ep::at_column(halves, n), acc, 0, 0).bits, expected);
    }
  }
}

template <class... Epilogues>
void halves_of_each_are_rounded_floats(ep::List<Epilogues...>, std::mt19937& random) {
  (halves_are_rounded_floats<Epilogues>(random), ...);
}

// Whether a call with these operands uses an epilogue of a list.
template <class Expected, class Epilogues>
bool uses(Epilogues list, ep::Operands const& operands) {
  return ep::with_epilogue(list, operands, []<class Found>() { return std::is_same_v<Expected, Found>; });
}

void the_first_that_applies_is_used() {
  std::int32_t const azp_adj = 1;
  ep::Operands const plain, with_zero_point{.azp_adj = &azp_adj};
  CHECK((uses<ep::Scaled>(ep::Int8Epilogues{}, plain)));
  CHECK((uses<ep::ScaledAzp>(ep::Int8Epilogues{}, with_zero_point)));
  CHECK((uses<ep::ScaledAzp>(ep::List<ep::Requantized, ep::ScaledAzp, ep::Scaled>{}, with_zero_point)));
  CHECK((uses<ep::Scaled>(ep::Float8Epilogues{}, plain)));
}

}  // namespace

int main() {
  every_half_is_widened_and_comes_back();
  std::mt19937 random = test::generator();
  halves_of_each_are_rounded_floats(ep::Int8Epilogues{}, random);
  the_first_that_applies_is_used();
  return test::failures != 0;
}
