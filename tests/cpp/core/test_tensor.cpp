// Views: shapes, strides, what messages say of them, and the names of architectures.

#include "check.h"
#include "epiloq/device.h"
#include "epiloq/error.h"
#include "epiloq/granularity.h"
#include "epiloq/tensor.h"

using namespace epiloq;

namespace {

void views_are_row_major() {
  float memory[2 * 3 * 5];
  TensorView const view(memory, DType::kFloat32, {}, {2, 3, 5});
  CHECK_EQUAL(view.rank, 3);
  CHECK_EQUAL(view.numel(), 30);
  CHECK_EQUAL(view.stride(0), 15);
  CHECK_EQUAL(view.stride(-2), 5);
  CHECK_EQUAL(view.size(-1), 5);
  CHECK_EQUAL(view.as<float>(), memory);
}

void transposing_exchanges_the_last_two_dimensions() {
  TensorView const view = transposed({nullptr, DType::kInt8, {}, {7, 17, 576}});
  CHECK_EQUAL(describe(view), "int8 [7, 576, 17] on the CPU");
  CHECK_EQUAL(view.stride(1), 1);
  CHECK_EQUAL(view.stride(2), 576);
}

void descriptions_name_dtype_shape_and_device() {
  CHECK_EQUAL(describe({nullptr, DType::kInt8, {Device::Type::kCuda, 1}, {17, 576}}), "int8 [17, 576] on cuda:1");
  CHECK_EQUAL(describe({nullptr, DType::kBFloat16, {}, {}}), "bfloat16 [] on the CPU");
  CHECK_EQUAL(describe({nullptr, DType::kFloat32, {}, {0, 4}}), "float32 [0, 4] on the CPU");
}

void what_is_no_dtype_is_named() {
  auto const none = static_cast<DType>(77);
  CHECK_EQUAL(std::string(name(none)), "another dtype");
  CHECK_EQUAL(std::string(name(static_cast<Granularity>(77))), "another granularity");
}

void sizes_of_elements() {
  CHECK_EQUAL(size_of(DType::kInt8), 1);
  CHECK_EQUAL(size_of(DType::kInt32), 4);
  CHECK_EQUAL(size_of(DType::kFloat16), 2);
  CHECK_EQUAL(size_of(DType::kBFloat16), 2);
  CHECK_EQUAL(size_of(DType::kFloat32), 4);
}

void architectures_have_names() {
  for (Arch arch : {Arch::kAuto, Arch::kSm75, Arch::kSm80, Arch::kSm90}) CHECK(parse_arch(name(arch)) == arch);
  CHECK_THROWS(InvalidArgument, parse_arch("sm70"), "epiloq: arch: expected one of", "sm75", "got sm70");
  force_arch(Arch::kSm80);
  CHECK(forced_arch() == Arch::kSm80);
  force_arch(Arch::kAuto);
  CHECK(forced_arch() == Arch::kAuto);
}

}  // namespace

int main() {
  views_are_row_major();
  transposing_exchanges_the_last_two_dimensions();
  descriptions_name_dtype_shape_and_device();
  what_is_no_dtype_is_named();
  sizes_of_elements();
  architectures_have_names();
  return test::failures != 0;
}
