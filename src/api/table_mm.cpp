#include "epiloq/table_mm.h"

#include "core/checks.h"
#include "dispatch/arch.h"
#include "epiloq/device.h"
#include "epiloq/error.h"
#include "problems/table_mm.h"

namespace epiloq {
namespace {

using ops::table_mm::kDepth;
using ops::table_mm::kMostTokens;
using ops::table_mm::Problem;
using ops::table_mm::Weight;

constexpr std::int64_t kMostRows = std::int64_t{1} << 31;
constexpr int kEntries = 16;

Weight checked(Checker const& check, TableWeight const& w) {
  if (w.n < 0 || w.n >= kMostRows) check.fail("n", "expected 0 to 2^31 - 1, got ", w.n);
  if (w.k < 0 || w.k >= kMostRows) check.fail("k", "expected 0 to 2^31 - 1, got ", w.k);
  if (w.block_size < 1) check.fail("block_size", "expected at least 1, got ", w.block_size);
  check.tensor("codes", w.codes, {DType::kUInt8});
  check.tensor("table", w.table, {DType::kFloat32});
  check.tensor("scale", w.scale, {DType::kFloat32});
  check.vector("codes", w.codes, ceil_div(w.n * w.k, 2));
  check.vector("table", w.table, kEntries);
  check.vector("scale", w.scale, ceil_div(w.n * w.k, w.block_size));
  return {w.n,
          w.k,
          w.block_size,
          w.codes.as<std::uint8_t>(),
          static_cast<float const*>(w.table.data),
          static_cast<float const*>(w.scale.data)};
}

void check_apart(Checker const& check, TensorView const& out, TableWeight const& w) {
  check.apart("out", out, "codes", w.codes);
  check.apart("out", out, "table", w.table);
  check.apart("out", out, "scale", w.scale);
}

Problem checked(TableMm const& call) {
  Checker const check("table_mm", call.x.device);
  check.tensor("x", call.x, kFloats);
  Weight const weight = checked(check, call.weight);
  auto const [x, out] = check.product(call.x, call.out, call.bias, weight.n, weight.k);
  check_apart(check, call.out, call.weight);
  return {weight, x.rows, call.x.data, call.out.data, call.bias ? call.bias->data : nullptr, x.stride, out.stride};
}

Weight checked(DequantizeTable const& call) {
  Checker const check("dequantize_table", call.out.device);
  check.tensor("out", call.out, kFloats);
  Weight const weight = checked(check, call.weight);
  check.contiguous("out", call.out);
  if (call.out.rank != 2 || call.out.shape[0] != weight.n || call.out.shape[1] != weight.k) {
    check.fail("out", "expected [", weight.n, ", ", weight.k, "], got ", describe(call.out));
  }
  check_apart(check, call.out, call.weight);
  return weight;
}

// Why the decode kernel does not support a problem; null if it does.
char const* unsupported_reason(Problem const& p, DType x, Arch arch) {
  Weight const& w = p.weight;
  if (p.m > kMostTokens) return "more than 64 rows";
  if (x == DType::kFloat32) return "float32";
  if (x == DType::kBFloat16 && arch == Arch::kSm75) return "bfloat16 on sm75";
  if (w.block_size % kDepth != 0 || w.k % w.block_size != 0) return "blocks that do not fill steps of 64 columns";
  if (!is_aligned(p.x) || (p.m > 1 && p.stride_x % 8 != 0)) return "rows of x that are not 16-byte aligned";
  if (!is_aligned(w.codes, 8)) return "codes that are not 8-byte aligned";
  return nullptr;
}

char const* unsupported_reason(Problem const& p, TableMm const& call) {
  return unsupported_reason(p, call.x.dtype, target_of("table_mm", KernelSet::kWeightOnly, call.x.device).arch);
}

bool suits_host(Problem const& p) {
  return p.m <= ops::table_mm::kMostHostTokens && ops::table_mm::has_host_blocks(p.weight);
}

}  // namespace

void check(TableMm const& call) { checked(call); }
void check(DequantizeTable const& call) { checked(call); }

bool table_mm(TableMm const& call, Stream stream) {
  Problem const problem = checked(call);
  if (problem.m == 0 || problem.weight.n == 0) return true;
  if (call.x.device.type == Device::Type::kCpu) {
    if (!suits_host(problem)) return false;
    ops::table_mm::multiply_on_host(problem, call.x.dtype, call.threads);
    return true;
  }
  if (problem.weight.k == 0 || unsupported_reason(problem, call) != nullptr) return false;
  ops::table_mm::launch(problem, call.x.dtype, call.x.device.index, stream);
  return true;
}

void dequantize_table(DequantizeTable const& call, Stream stream) {
  Weight const weight = checked(call);
  if (weight.n == 0 || weight.k == 0) return;
  if (call.out.device.type == Device::Type::kCpu) {
    if (!ops::table_mm::has_host_blocks(weight)) {
      throw Unsupported("epiloq.dequantize_table: block_size: expected a multiple of 8 that divides k on the CPU");
    }
    return ops::table_mm::dequantize_on_host(weight, call.out.data, call.out.dtype, call.threads);
  }
  ops::table_mm::launch_dequantize(weight, call.out.data, call.out.dtype, call.out.device.index, stream);
}

std::string explain(TableMm const& call) {
  Problem const problem = checked(call);
  if (problem.m == 0 || problem.weight.n == 0) return "nothing to launch: the output is empty";
  if (call.x.device.type == Device::Type::kCpu) {
    return suits_host(problem) ? "cpu, indices looked up in registers" : "cpu, torch: dequantised some rows at a time";
  }
  char const* const why = unsupported_reason(problem, call);
  if (why == nullptr) return "table decode kernel, mma.sync";
  return std::string("dequantised into memory, then a dense product (") + why + ")";
}

#if !EPILOQ_HAS_CUDA
void ops::table_mm::launch(Problem const&, DType, int device, Stream) { device_properties(device); }
void ops::table_mm::launch_dequantize(Weight const&, void*, DType, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq
