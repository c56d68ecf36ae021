// The exceptions cross the library's boundary as what they are, and as what they derive from.

#include <type_traits>

#include "check.h"
#include "epiloq/device.h"
#include "epiloq/error.h"
#include "epiloq/scaled_mm.h"

using namespace epiloq;

static_assert(std::is_base_of_v<std::runtime_error, Error>);
static_assert(std::is_base_of_v<Error, InvalidArgument> && !std::is_base_of_v<InvalidArgument, Unsupported>);
static_assert(std::is_base_of_v<Error, Unsupported> && std::is_base_of_v<Error, CudaError>);

namespace {

void an_invalid_argument_is_an_error() {
  CHECK_THROWS(InvalidArgument, parse_arch("sm1"), "got sm1");
  CHECK_THROWS(Error, parse_arch("sm1"), "got sm1");
  CHECK_THROWS(std::runtime_error, parse_arch("sm1"), "got sm1");
}

void a_build_without_kernels_says_so() {
  if (!built_archs().empty()) return;
  CHECK_THROWS(Unsupported, device_properties(0), "no CUDA kernels");
}

void a_product_on_the_cpu_is_unsupported() {
  alignas(16) std::int8_t a[16] = {}, b[16] = {};
  alignas(16) std::uint16_t out[1];
  float one = 1;
  TensorView const scale(&one, DType::kFloat32, {}, {1});
  ScaledMm const call{.out = {out, DType::kFloat16, {}, {1, 1}},
                      .a = {a, DType::kInt8, {}, {1, 16}},
                      .b = transposed({b, DType::kInt8, {}, {1, 16}}),
                      .scale_a = scale,
                      .scale_b = scale};
  CHECK_THROWS(Unsupported, scaled_mm(call, nullptr), "epiloq.scaled_mm: a: expected a tensor on a CUDA device",
               "int8 [1, 16] on the CPU");
}

void views_that_are_none_are_refused() {
  alignas(16) std::int8_t a[16] = {}, b[16] = {};
  alignas(16) float out[1];
  float one = 1;
  TensorView const scale(&one, DType::kFloat32, {}, {1});
  ScaledMm const good{.out = {out, DType::kFloat32, {}, {1, 1}},
                      .a = {a, DType::kInt8, {}, {1, 16}},
                      .b = transposed({b, DType::kInt8, {}, {1, 16}}),
                      .scale_a = scale,
                      .scale_b = scale};
  scaled_mm(good);
  ScaledMm negative = good, backwards = good, many = good, strange = good;
  negative.a.shape[0] = negative.out.shape[0] = -1;
  CHECK_THROWS(InvalidArgument, scaled_mm(negative), "a: expected no negative sizes", "int8 [-1, 16]");
  backwards.a.rank = -1;
  CHECK_THROWS(InvalidArgument, scaled_mm(backwards), "a: expected at most 6 dimensions, got -1");
  many.a.rank = 7;
  CHECK_THROWS(InvalidArgument, scaled_mm(many), "a: expected at most 6 dimensions, got 7");
  strange.a.dtype = static_cast<DType>(77);
  CHECK_THROWS(InvalidArgument, scaled_mm(strange), "a: expected int8", "got another dtype");
}

}  // namespace

int main() {
  an_invalid_argument_is_an_error();
  a_build_without_kernels_says_so();
  a_product_on_the_cpu_is_unsupported();
  views_that_are_none_are_refused();
  return test::failures != 0;
}
