#include "api/checks/packed_weight.h"

#include <algorithm>

#include "cpu/common/rows.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::weight_only_mm {
namespace {

// n for a group of 2^n times 128 columns; for the whole row one that no step reaches.
int group_shift(std::int64_t group, std::int64_t padded_k) {
  if (group == padded_k) return 30;
  int shift = 0;
  while (kPadding << shift < group) ++shift;
  return shift;
}

// The inverse of parameter_of.
constexpr int row_of(int parameter) { return parameter / 2 + parameter % 2 * 8; }

EPILOQ_CLONES int largest(std::uint8_t const* values, std::int64_t count) {
  std::uint8_t most = 0;
  for (std::int64_t i = 0; i < count; ++i) most = std::max(most, values[i]);
  return most;
}

// On the CPU, where they can be read: some of its products hold q - zero in few bits. Rows past N and groups past K may
// hold anything.
void check_zeros(Checker const& check, PackedWeight const& w, std::int64_t groups, std::int64_t used) {
  int const most = 1 << w.bits;
  auto const* zero = w.zero->as<std::uint8_t>();
  for (std::int64_t row = 0; row < w.n; row += kPanelRows, zero += groups * kPanelRows) {
    int found = largest(zero, used * kPanelRows);
    if (found > most && w.n - row < kPanelRows) {
      found = 0;
      for (std::int64_t i = 0; i < used * kPanelRows; ++i) {
        if (row + row_of(static_cast<int>(i % kPanelRows)) < w.n) found = std::max<int>(found, zero[i]);
      }
    }
    if (found > most) check.fail("weight.zero", "expected 0 to ", most, " with ", w.bits, " bits, got ", found);
  }
}

void check_fp4(Checker const& check, PackedWeight const& w) {
  int const group = w.format == WeightFormat::kMxfp4 ? 32 : 16;
  if (w.bits != 4) check.fail("bits", "expected 4 with FP4, got ", w.bits);
  if (w.group_size != group) check.fail("group_size", "expected ", group, " with this FP4, got ", w.group_size);
  if (w.zero) check.fail("zero", "expected none with FP4, got ", describe(*w.zero));
  if (w.offset) check.fail("offset", "expected none with FP4, got ", describe(*w.offset));
}

}  // namespace

void check_format(Checker const& check, int bits, std::int64_t group_size) {
  if (bits != 2 && bits != 3 && bits != 4 && bits != 8) check.fail("bits", "expected 2, 3, 4 or 8, got ", bits);
  if (group_size < 1 && group_size != -1) check.fail("group_size", "expected -1 or at least 1, got ", group_size);
}

Weight weight_of_sizes(Checker const& check, int bits, std::int64_t n, std::int64_t k, std::int64_t group_size,
                       DType scale_dtype) {
  check_format(check, bits, group_size);
  if (n < 0 || n > kMaxSize) check.fail("n", "expected 0 to ", kMaxSize, ", got ", n);
  if (k < 0 || k > kMaxSize) check.fail("k", "expected 0 to ", kMaxSize, ", got ", k);
  std::int64_t const padded_k = ceil_div(k, kPadding) * kPadding;
  std::int64_t const group = group_size == -1 ? padded_k : std::min(group_size, padded_k);
  Weight weight{};
  weight.n = static_cast<int>(n), weight.k = static_cast<int>(k), weight.padded_k = static_cast<int>(padded_k);
  weight.bits = bits;
  weight.group = static_cast<int>(std::max<std::int64_t>(group, 1));
  weight.groups = static_cast<int>(padded_k == 0 ? 0 : ceil_div(padded_k, group));
  weight.group_shift = group_shift(group, padded_k);
  weight.scale_dtype = scale_dtype;
  return weight;
}

Weight checked_weight(Checker const& check, PackedWeight const& w) {
  if (w.format != WeightFormat::kInteger) check.fail("weight", "expected integers, got FP4");
  return checked_weight_of_any_format(check, w);
}

Weight checked_weight_of_any_format(Checker const& check, PackedWeight const& w) {
  Weight weight = weight_of_sizes(check, w.bits, w.n, w.k, w.group_size, w.scale.dtype);
  if (w.zero && w.offset) check.fail("offset", "expected none with zero, got ", describe(*w.offset));
  std::int64_t const panels = ceil_div(w.n, kPanelRows);
  check.tensor("weight.q", w.q, {DType::kUInt8});
  if (w.format == WeightFormat::kInteger) {
    check.tensor("weight.scale", w.scale, kFloats);
  } else {
    check_fp4(check, w);
    check.tensor("weight.scale", w.scale, {DType::kUInt8});
  }
  check.shape("weight.q", w.q, {panels, weight.padded_k / depth(w.bits), kLanes, lane_bytes(w.bits)});
  check.shape("weight.scale", w.scale, {panels, weight.groups, kPanelRows});
  check.aligned16("weight.q", w.q);
  check.aligned16("weight.scale", w.scale);
  if (w.zero) {
    check.tensor("weight.zero", *w.zero, {DType::kUInt8});
    check.shape("weight.zero", *w.zero, {panels, weight.groups, kPanelRows});
    check.aligned16("weight.zero", *w.zero);
    if (w.zero->device.type == Device::Type::kCpu && w.bits < 8 && w.k > 0) {
      check_zeros(check, w, weight.groups, ceil_div(w.k, std::int64_t{weight.group}));
    }
  }
  if (w.offset) {
    check.tensor("weight.offset", *w.offset, {w.scale.dtype});
    check.shape("weight.offset", *w.offset, {panels, weight.groups, kPanelRows});
    check.aligned16("weight.offset", *w.offset);
  }
  weight.q = w.q.as<std::uint8_t>();
  weight.scale = w.scale.data;
  weight.zero = w.zero ? w.zero->as<std::uint8_t>() : nullptr;
  weight.offset = w.offset ? w.offset->data : nullptr;
  return weight;
}

void check_apart(Checker const& check, TensorView const& out, PackedWeight const& w) {
  check.apart("out", out, "weight.q", w.q);
  check.apart("out", out, "weight.scale", w.scale);
  if (w.zero) check.apart("out", out, "weight.zero", *w.zero);
  if (w.offset) check.apart("out", out, "weight.offset", *w.offset);
}

}  // namespace epiloq::ops::weight_only_mm
