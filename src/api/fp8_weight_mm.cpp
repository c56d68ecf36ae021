#include "epiloq/fp8_weight_mm.h"

#include <algorithm>

#include "core/checks.h"
#include "dispatch/arch.h"
#include "epiloq/device.h"
#include "problems/fp8_weight_mm.h"

namespace epiloq {
namespace {

using ops::fp8_weight_mm::DequantizeProblem;
using ops::fp8_weight_mm::kDepth;
using ops::fp8_weight_mm::kLaneColumns;
using ops::fp8_weight_mm::kMostTokens;
using ops::fp8_weight_mm::Problem;
using ops::fp8_weight_mm::Weight;

constexpr std::int64_t kMostRows = std::int64_t{1} << 31;
constexpr std::int64_t kMostElements = std::int64_t{1} << 33;  // that the decode kernel counts eight at a time

std::int64_t checked_block(Checker const& check, char const* argument, std::int64_t block, std::int64_t whole) {
  if (block < 1 && block != -1) check.fail(argument, "expected at least 1, or -1 for all, got ", block);
  return std::max<std::int64_t>(block == -1 ? whole : std::min(block, whole), 1);
}

Weight checked(Checker const& check, Fp8Weight const& w) {
  check.tensor("weight", w.q, {DType::kFloat8E4M3});
  check.tensor("scale", w.scale, {DType::kFloat32});
  if (w.q.rank != 2) check.fail("weight", "expected [N, K], got ", describe(w.q));
  Matrix const q = check.rows("weight", w.q);
  if (q.rows >= kMostRows || q.cols >= kMostRows) {
    check.fail("weight", "expected fewer than 2^31 rows and columns, got ", describe(w.q));
  }
  std::int64_t const rows = checked_block(check, "block[0]", w.block_rows, q.rows);
  std::int64_t const columns = checked_block(check, "block[1]", w.block_columns, q.cols);
  std::int64_t const scale_rows = w.block_rows == -1 ? 1 : ceil_div(q.rows, rows);
  std::int64_t const scale_columns = w.block_columns == -1 ? 1 : ceil_div(q.cols, columns);
  bool const is_grid = w.scale.rank == 2 && w.scale.shape[0] == scale_rows && w.scale.shape[1] == scale_columns;
  bool const is_vector = w.scale.rank == 1 && scale_columns == 1 && w.scale.shape[0] == scale_rows;
  if (!is_grid && !is_vector) {
    check.fail("scale", "expected [", scale_rows, ", ", scale_columns, "]",
               scale_columns == 1 ? " or its first dimension" : "", ", got ", describe(w.scale));
  }
  check.contiguous("scale", w.scale);
  return {q.rows, q.cols,  q.stride,     w.q.as<std::uint8_t>(), static_cast<float const*>(w.scale.data),
          rows,   columns, scale_columns};
}

void check_apart(Checker const& check, TensorView const& out, Fp8Weight const& w) {
  check.apart("out", out, "weight", w.q);
  check.apart("out", out, "scale", w.scale);
}

Problem checked(Fp8WeightMm const& call) {
  Checker const check("fp8_weight_mm", call.x.device);
  check.tensor("x", call.x, kFloats);
  Weight const weight = checked(check, call.weight);
  auto const [x, out] = check.product(call.x, call.out, call.bias, weight.n, weight.k);
  check_apart(check, call.out, call.weight);
  return {weight, x.rows, call.x.data, call.out.data, call.bias ? call.bias->data : nullptr, x.stride, out.stride};
}

DequantizeProblem checked(DequantizeFp8 const& call) {
  Checker const check("dequantize_fp8", call.out.device);
  check.tensor("out", call.out, kFloats);
  Weight const weight = checked(check, call.weight);
  check.contiguous("out", call.out);
  if (call.out.rank != 2 || call.out.shape[1] != weight.k) {
    check.fail("out", "expected rows of ", weight.k, ", got ", describe(call.out));
  }
  std::int64_t const rows = call.out.shape[0];
  if (call.first_row < 0 || call.first_row > weight.n - rows) {
    check.fail("first_row", "expected 0 to ", weight.n - rows, ", got ", call.first_row);
  }
  check_apart(check, call.out, call.weight);
  return {weight, call.first_row, rows, call.out.data, call.out.dtype};
}

// Why the decode kernel does not support a problem; null if it does.
char const* unsupported_reason(Problem const& p, DType x, Arch arch) {
  Weight const& w = p.weight;
  if (p.m > kMostTokens) return "more than 64 rows";
  if (x == DType::kFloat32) return "float32";
  if (x == DType::kBFloat16 && arch == Arch::kSm75) return "bfloat16 on sm75";
  if (w.block_columns < w.k && w.block_columns % kDepth != 0) return "blocks that do not fill steps of 64 columns";
  if (!is_aligned(p.x) || (p.m > 1 && p.stride_x % 8 != 0)) return "rows of x that are not 16-byte aligned";
  if (p.m * std::max(p.stride_x, w.k) >= kMostElements) return "rows of x that are far apart";
  if (w.k % kLaneColumns != 0 || !is_aligned(w.q) || (w.n > 1 && w.stride % kLaneColumns != 0)) {
    return "rows of the weight that are not 16-byte aligned";
  }
  return nullptr;
}

char const* unsupported_reason(Problem const& p, Fp8WeightMm const& call) {
  return unsupported_reason(p, call.x.dtype, target_of("fp8_weight_mm", KernelSet::kWeightOnly, call.x.device).arch);
}

}  // namespace

void check(Fp8WeightMm const& call) { checked(call); }
void check(DequantizeFp8 const& call) { checked(call); }

bool fp8_weight_mm(Fp8WeightMm const& call, Stream stream) {
  Problem const problem = checked(call);
  if (problem.m == 0 || problem.weight.n == 0) return true;
  if (call.x.device.type == Device::Type::kCpu) {
    if (!ops::fp8_weight_mm::has_host_blocks(problem.weight)) return false;
    ops::fp8_weight_mm::multiply_on_host(problem, call.x.dtype, call.threads);
    return true;
  }
  if (problem.weight.k == 0 || unsupported_reason(problem, call) != nullptr) return false;
  ops::fp8_weight_mm::launch(problem, call.x.dtype, call.x.device.index, stream);
  return true;
}

void dequantize_fp8(DequantizeFp8 const& call, Stream stream) {
  DequantizeProblem const problem = checked(call);
  if (problem.rows == 0 || problem.weight.k == 0) return;
  if (call.out.device.type == Device::Type::kCpu) {
    return ops::fp8_weight_mm::dequantize_on_host(problem, call.threads);
  }
  ops::fp8_weight_mm::launch_dequantize(problem, call.out.device.index, stream);
}

std::string explain(Fp8WeightMm const& call) {
  Problem const problem = checked(call);
  if (problem.m == 0 || problem.weight.n == 0) return "nothing to launch: the output is empty";
  if (call.x.device.type == Device::Type::kCpu) {
    bool const fits = ops::fp8_weight_mm::has_host_blocks(problem.weight);
    return fits ? std::string("cpu, ") + ops::fp8_weight_mm::describe_on_host(problem, call.x.dtype)
                : "cpu, torch: dequantised some rows at a time";
  }
  char const* const why = unsupported_reason(problem, call);
  if (why == nullptr) return "fp8 weight decode kernel, mma.sync";
  return std::string("dequantised into memory, then a dense product (") + why + ")";
}

#if !EPILOQ_HAS_CUDA
void ops::fp8_weight_mm::launch(Problem const&, DType, int device, Stream) { device_properties(device); }
void ops::fp8_weight_mm::launch_dequantize(DequantizeProblem const&, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq
