// Kernels that move 16 bytes at a time are chosen only for pointers and strides that are multiples of 16 bytes: for
// any others the checks refuse the call, or dispatch chooses a kernel that moves elements. Addresses are made up, as
// neither checks nor dispatch read memory. Kernels that test the alignment themselves are listed in
// tests/build/test_vector_accesses.py.

#include <string>
#include <vector>

#include "api/checks/quantized_rows.h"
#include "check.h"
#include "epiloq/conv2d_int8.h"
#include "epiloq/device.h"
#include "epiloq/error.h"
#include "epiloq/groupwise_mm.h"
#include "epiloq/online_quant_mm.h"
#include "epiloq/quantize_fp8.h"
#include "epiloq/scaled_bmm.h"
#include "epiloq/scaled_mm.h"
#include "epiloq/weight_only_mm.h"

using namespace epiloq;

namespace {

constexpr int kVector = 16;  // bytes
constexpr Device kGpu{Device::Type::kCuda, 0};

// Views of memory far apart that nothing reads.
TensorView view(DType dtype, std::initializer_list<std::int64_t> shape, Device device = {}) {
  static std::uintptr_t next = 0;
  next += std::uintptr_t{1} << 32;
  return {reinterpret_cast<void*>(next), dtype, device, shape};
}

void* moved(void* data, int bytes) { return static_cast<char*>(data) + bytes; }

// What happens to a pointer that is no multiple of 16 bytes, or to a stride: the call is refused, a kernel is chosen
// that does not mind, or nothing, as no kernel reads several elements of that operand at a time.
enum class Unaligned { kRefused, kOtherKernel, kSameKernel };

template <class Call>
struct Operand {
  char const* name;
  TensorView& (*of)(Call&);
  Unaligned pointer;
  int stride_unit = 0;  // bytes of which the row stride must be a multiple for the fast kernel; 0: it has no rows
};

template <class Call>
void drive(Call const& aligned, std::string (*kernel_of)(Call const&), std::string const& other,
           std::vector<Operand<Call>> const& operands) {
  std::string const fast = kernel_of(aligned);
  CHECK(fast.find(other) == std::string::npos);
  auto const is_other = [&](Call const& call) {
    std::string const kernel = kernel_of(call);
    if (kernel.find(other) == std::string::npos) test::report(__FILE__, __LINE__, kernel + " is not " + other);
  };
  for (auto const& [name, of, pointer, stride_unit] : operands) {
    Call call = aligned;
    int const bytes = size_of(of(call).dtype);
    for (int offset = bytes; offset <= kVector; offset += bytes) {
      call = aligned;
      of(call).data = moved(of(call).data, offset);
      if (offset == kVector || pointer == Unaligned::kSameKernel) {
        CHECK_EQUAL(kernel_of(call), fast);
      } else if (pointer == Unaligned::kOtherKernel) {
        is_other(call);
      } else {
        CHECK_THROWS(InvalidArgument, kernel_of(call), std::string(name) + ": expected a pointer aligned to 16 bytes");
      }
    }
    for (int more = 1; stride_unit != 0 && more * bytes <= kVector; ++more) {
      call = aligned;
      TensorView& rows = of(call);
      int const dimension = rows.strides[rows.rank - 1] == 1 ? rows.rank - 2 : rows.rank - 1;  // of b: columns
      rows.strides[dimension] += more;
      if (rows.rank == 3) rows.strides[0] += rows.shape[dimension] * more;
      if (more * bytes % stride_unit == 0) {
        CHECK_EQUAL(kernel_of(call), fast);
      } else {
        is_other(call);
      }
      if (rows.rank != 3) continue;
      call = aligned;
      of(call).strides[0] += more;  // of batches
      if (more * bytes % stride_unit != 0) is_other(call);
    }
  }
}

template <class Call>
std::string chosen(Call const& call) {
  return explain(call);
}

template <class Call>
std::string chosen_of_product(Call const& call) {
  return explain(call, false);
}

void scaled_products(Arch arch, DType dtype, std::int64_t m) {
  force_arch(arch);
  constexpr std::int64_t kN = 512, kK = 1024;
  ScaledMm call{.out = view(DType::kBFloat16, {m, kN}),
                .a = view(dtype, {m, kK}),
                .b = transposed(view(dtype, {kN, kK})),
                .scale_a = view(DType::kFloat32, {m, 1}),
                .scale_b = view(DType::kFloat32, {1, kN}),
                .bias = view(DType::kBFloat16, {kN})};
  if (dtype == DType::kInt8) call.azp_adj = view(DType::kInt32, {kN}), call.azp = view(DType::kInt32, {m, 1});
  std::vector<Operand<ScaledMm>> operands{
      {"out", [](ScaledMm& c) -> TensorView& { return c.out; }, Unaligned::kRefused, kVector},
      {"a", [](ScaledMm& c) -> TensorView& { return c.a; }, Unaligned::kRefused, kVector},
      {"b", [](ScaledMm& c) -> TensorView& { return c.b; }, Unaligned::kRefused, kVector},
      {"scale_a", [](ScaledMm& c) -> TensorView& { return c.scale_a; }, Unaligned::kSameKernel},
      {"scale_b", [](ScaledMm& c) -> TensorView& { return c.scale_b; }, Unaligned::kSameKernel},
      {"bias", [](ScaledMm& c) -> TensorView& { return *c.bias; }, Unaligned::kSameKernel}};
  if (dtype == DType::kInt8) {
    operands.push_back({"azp_adj", [](ScaledMm& c) -> TensorView& { return *c.azp_adj; }, Unaligned::kSameKernel});
    operands.push_back({"azp", [](ScaledMm& c) -> TensorView& { return *c.azp; }, Unaligned::kSameKernel});
  }
  drive<ScaledMm>(call, chosen_of_product, "generic", operands);
  force_arch(Arch::kAuto);
}

void batched_products(Arch arch, DType dtype, DType out) {
  force_arch(arch);
  ScaledBmm call{.out = view(out, {3, 64, 256}),
                 .a = view(dtype, {3, 64, 128}),
                 .b = view(dtype, {3, 256, 128}),
                 .scale_a = view(DType::kFloat32, {3, 64, 1}),
                 .scale_b = view(DType::kFloat32, {3, 1, 256})};
  call.b = transposed(call.b);
  if (out == DType::kInt8) call.scale_out = view(DType::kFloat32, {1});
  // Eight int8 outputs are a vector.
  int const unit = 8 * size_of(out);
  drive<ScaledBmm>(call, chosen, "generic",
                   {{"out", [](ScaledBmm& c) -> TensorView& { return c.out; }, Unaligned::kRefused, unit},
                    {"a", [](ScaledBmm& c) -> TensorView& { return c.a; }, Unaligned::kRefused, kVector},
                    {"b", [](ScaledBmm& c) -> TensorView& { return c.b; }, Unaligned::kRefused, kVector},
                    {"scale_a", [](ScaledBmm& c) -> TensorView& { return c.scale_a; }, Unaligned::kSameKernel},
                    {"scale_b", [](ScaledBmm& c) -> TensorView& { return c.scale_b; }, Unaligned::kSameKernel}});
  force_arch(Arch::kAuto);
}

// The kernels of issue 15 of docs/lessons.md: TMA loads of a and b; scales of any alignment and stride, which a launch
// copies by TMA only if they are on 16 bytes, or four bytes at a time; an output whose rows may begin anywhere.
void groupwise_products(Arch arch, std::int64_t m, bool column_scales) {
  force_arch(arch);
  constexpr std::int64_t kN = 512, kK = 1024, kGroups = kK / 128;
  GroupwiseMm call{.out = view(DType::kBFloat16, {m, kN}),
                   .a = view(DType::kFloat8E4M3, {m, kK}),
                   .b = transposed(view(DType::kFloat8E4M3, {kN, kK})),
                   .scale_a = view(DType::kFloat32, {m, kGroups}),
                   .scale_b = transposed(view(DType::kFloat32, {column_scales ? kN : kN / 128, kGroups})),
                   .bias = view(DType::kBFloat16, {kN}),
                   .columns_per_scale = column_scales ? 1 : 128};
  drive<GroupwiseMm>(call, chosen_of_product, "generic",
                     {{"out", [](GroupwiseMm& c) -> TensorView& { return c.out; }, Unaligned::kRefused},
                      {"a", [](GroupwiseMm& c) -> TensorView& { return c.a; }, Unaligned::kRefused, kVector},
                      {"b", [](GroupwiseMm& c) -> TensorView& { return c.b; }, Unaligned::kRefused, kVector},
                      {"scale_a", [](GroupwiseMm& c) -> TensorView& { return c.scale_a; }, Unaligned::kSameKernel},
                      {"scale_b", [](GroupwiseMm& c) -> TensorView& { return c.scale_b; }, Unaligned::kSameKernel},
                      {"bias", [](GroupwiseMm& c) -> TensorView& { return *c.bias; }, Unaligned::kSameKernel}});
  force_arch(Arch::kAuto);
}

void weight_only_products(Arch arch, std::int64_t m) {
  force_arch(arch);
  constexpr std::int64_t kN = 512, kK = 1024;
  WeightOnlyMm call{.out = view(DType::kFloat16, {m, kN}),
                    .x = view(DType::kFloat16, {m, kK}),
                    .weight = {.q = view(DType::kUInt8, {kN / 16, kK / 64, 32, 16}),
                               .scale = view(DType::kFloat16, {kN / 16, kK / 128, 16}),
                               .offset = view(DType::kFloat16, {kN / 16, kK / 128, 16}),
                               .bits = 4,
                               .n = kN,
                               .k = kK,
                               .group_size = 128},
                    .bias = view(DType::kFloat16, {kN})};
  using C = WeightOnlyMm;
  drive<C>(call, chosen_of_product, "rows of x off 16 bytes",
           {{"x", [](C& c) -> TensorView& { return c.x; }, Unaligned::kOtherKernel, kVector},
            {"weight.q", [](C& c) -> TensorView& { return c.weight.q; }, Unaligned::kRefused},
            {"weight.scale", [](C& c) -> TensorView& { return c.weight.scale; }, Unaligned::kRefused},
            {"weight.offset", [](C& c) -> TensorView& { return *c.weight.offset; }, Unaligned::kRefused},
            {"out", [](C& c) -> TensorView& { return c.out; }, Unaligned::kSameKernel},
            {"bias", [](C& c) -> TensorView& { return *c.bias; }, Unaligned::kSameKernel}});
  force_arch(Arch::kAuto);
}

// Copies of 16, 4 or 1 bytes, by the widest that all of them allow.
void convolutions_int8(Arch arch) {
  force_arch(arch);
  Conv2dInt8 const call{.out = view(DType::kFloat16, {1, 14, 14, 64}),
                        .x = view(DType::kInt8, {1, 16, 16, 32}),
                        .weight = view(DType::kInt8, {64, 3, 3, 32}),
                        .scale = view(DType::kFloat32, {64}),
                        .bias = view(DType::kFloat32, {64})};
  auto const bytes_of = [](Conv2dInt8 const& c) {
    std::string const kernel = explain(c);
    for (int bytes : {16, 4, 1}) {
      if (kernel.find("copies of " + std::to_string(bytes) + " channel") != std::string::npos) return bytes;
    }
    test::report(__FILE__, __LINE__, "no bytes in: " + kernel);
    return 0;
  };
  for (int offset = 0; offset <= kVector; ++offset) {
    int const expected = offset % 16 == 0 ? 16 : offset % 4 == 0 ? 4 : 1;
    Conv2dInt8 of_x = call, of_weight = call, of_row = call;
    of_x.x.data = moved(of_x.x.data, offset);
    of_weight.weight.data = moved(of_weight.weight.data, offset);
    of_row.x.strides[1] += offset, of_row.x.strides[0] += 16 * offset;
    for (Conv2dInt8 const& moved_call : {of_x, of_weight, of_row}) CHECK_EQUAL(bytes_of(moved_call), expected);
  }
  force_arch(Arch::kAuto);
}

// One pass over memory in vectors, or element by element.
void quantised_fp8(DType dtype, Granularity granularity) {
  constexpr std::int64_t kRows = 5, kCols = 256;
  std::int64_t const scales = granularity == Granularity::kGroup ? kCols / 128 : 1;
  QuantizeFp8 call{.q = view(DType::kFloat8E4M3, {kRows, kCols}, kGpu),
                   .x = view(dtype, {kRows, kCols}, kGpu),
                   .scale = view(DType::kFloat32, {granularity == Granularity::kBlock ? 1 : kRows, scales}, kGpu),
                   .granularity = granularity};
  if (granularity == Granularity::kBlock) call.scale = view(DType::kFloat32, {1, kCols / 128}, kGpu);
  drive<QuantizeFp8>(call, chosen, "element by element",
                     {{"x", [](QuantizeFp8& c) -> TensorView& { return c.x; }, Unaligned::kOtherKernel, kVector},
                      {"scale", [](QuantizeFp8& c) -> TensorView& { return c.scale; }, Unaligned::kSameKernel}});
  // Eight bytes of q are stored at a time.
  for (int offset = 1; offset <= kVector; ++offset) {
    QuantizeFp8 pointer = call, stride = call;
    pointer.q.data = moved(pointer.q.data, offset);
    stride.q.strides[0] += offset;
    for (QuantizeFp8 const& q : {pointer, stride}) {
      CHECK_EQUAL(explain(q).find("element by element") == std::string::npos, offset % 8 == 0);
    }
  }
}

// rms_norm_quant and silu_and_mul_quant: every input, and q.
void quantised_rows(DType dtype) {
  constexpr std::int64_t kCols = 256;
  TensorView const x = view(dtype, {5, kCols}), q = view(DType::kInt8, {5, kCols});
  int const bytes = size_of(dtype);
  for (int more = 0; more * bytes <= kVector; ++more) {
    bool const whole = more * bytes % kVector == 0;
    CHECK_EQUAL(in_vectors(moved(x.data, more * bytes), dtype, kCols, kCols), whole);
    CHECK_EQUAL(in_vectors(x.data, dtype, kCols + more, kCols), whole);
    if (more < 8) CHECK_EQUAL(in_vectors(x.data, dtype, kCols, kCols + more), more == 0);
  }
  QuantizedRows rows{};
  rows.rows = 5, rows.cols = rows.padded_cols = rows.tile_cols = kCols, rows.tiles = 1;
  for (int offset = 0; offset <= kVector; ++offset) {
    rows.q = static_cast<std::uint8_t*>(moved(q.data, offset)), rows.stride_q = kCols;
    CHECK_EQUAL(plan_rows(rows, true, 132).kernel != 0, offset % 8 == 0);
    rows.q = static_cast<std::uint8_t*>(q.data), rows.stride_q = kCols + offset;
    CHECK_EQUAL(plan_rows(rows, true, 132).kernel != 0, offset % 8 == 0);
    CHECK_EQUAL(plan_rows(rows, false, 132).kernel, 0);
  }
}

// The checks are the same on a GPU.
void refused_on_a_gpu() {
  for (int offset = 1; offset < kVector; ++offset) {
    auto const refused = [&](auto call, TensorView& operand, std::string const& name) {
      void* const data = operand.data;
      operand.data = moved(data, offset);
      CHECK_THROWS(InvalidArgument, call(), name + ": expected a pointer aligned to ");
      operand.data = data;
      call();
    };
    ScaledMm scaled{.out = view(DType::kBFloat16, {4, 32}, kGpu),
                    .a = view(DType::kInt8, {4, 64}, kGpu),
                    .b = transposed(view(DType::kInt8, {32, 64}, kGpu)),
                    .scale_a = view(DType::kFloat32, {1}, kGpu),
                    .scale_b = view(DType::kFloat32, {1}, kGpu)};
    auto const check_scaled = [&] { check(scaled); };
    refused(check_scaled, scaled.out, "out");
    refused(check_scaled, scaled.a, "a");
    refused(check_scaled, scaled.b, "b");
    DequantizeWeight dequantize{.out = view(DType::kBFloat16, {32, 128}, kGpu),
                                .weight = {.q = view(DType::kUInt8, {2, 2, 32, 16}, kGpu),
                                           .scale = view(DType::kFloat16, {2, 1, 16}, kGpu),
                                           .zero = view(DType::kUInt8, {2, 1, 16}, kGpu),
                                           .n = 32,
                                           .k = 128}};
    auto const check_dequantize = [&] { check(dequantize); };
    refused(check_dequantize, dequantize.out, "out");
    refused(check_dequantize, dequantize.weight.q, "weight.q");
    refused(check_dequantize, dequantize.weight.scale, "weight.scale");
    refused(check_dequantize, *dequantize.weight.zero, "weight.zero");
    OnlineQuantMm online{.out = view(DType::kFloat16, {4, 32}, kGpu),
                         .x = view(DType::kFloat16, {4, 128}, kGpu),
                         .values = view(DType::kInt8, {32, 128}, kGpu),
                         .parameters = view(DType::kFloat32, {1, 2, 32}, kGpu),
                         .in_features = 128,
                         .group_size = 128,
                         .bits = 8};
    auto const check_online = [&] { check(online); };
    refused(check_online, online.values, "w_q");
    refused(check_online, online.parameters, "w_scale");
  }
}

}  // namespace

int main() {
  for (std::int64_t m : {2, 16, 300}) {  // a single row has no stride
    for (Arch arch : {Arch::kSm75, Arch::kSm80, Arch::kSm90}) scaled_products(arch, DType::kInt8, m);
    for (Arch arch : {Arch::kSm89, Arch::kSm90}) {
      scaled_products(arch, DType::kFloat8E4M3, m);
      groupwise_products(arch, m, false), groupwise_products(arch, m, true);
    }
    for (Arch arch : {Arch::kSm75, Arch::kSm80, Arch::kSm90}) {
      weight_only_products(arch, m);
    }
  }
  for (Arch arch : {Arch::kSm80, Arch::kSm90}) {
    batched_products(arch, DType::kInt8, DType::kBFloat16);
    batched_products(arch, DType::kInt8, DType::kInt8);
  }
  batched_products(Arch::kSm90, DType::kFloat8E4M3, DType::kBFloat16);
  for (Arch arch : {Arch::kSm75, Arch::kSm80, Arch::kSm90}) convolutions_int8(arch);
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (Granularity granularity : {Granularity::kToken, Granularity::kGroup, Granularity::kBlock}) {
      quantised_fp8(dtype, granularity);
    }
    quantised_rows(dtype);
  }
  refused_on_a_gpu();
  return test::failures != 0;
}
