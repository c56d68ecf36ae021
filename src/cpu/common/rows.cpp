#include "cpu/common/rows.h"

#include <algorithm>
#include <limits>

#include "core/half.h"

namespace epiloq {
namespace {

EPILOQ_CLONES void read_float16(std::uint16_t const* x, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = float_of_float16(x[i]);
}
EPILOQ_CLONES void read_bfloat16(std::uint16_t const* x, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = float_of_bfloat16(x[i]);
}
EPILOQ_CLONES void write_float16(float const* x, int count, std::uint16_t* out) {
  for (int i = 0; i < count; ++i) out[i] = float16_of_float(x[i]);
}
EPILOQ_CLONES void write_bfloat16(float const* x, int count, std::uint16_t* out) {
  for (int i = 0; i < count; ++i) out[i] = bfloat16_of_float(x[i]);
}

// Separate lanes until the end, as compilers may not reorder a float minimum.
EPILOQ_CLONES Range measure_range(float const* x, int count) {
  constexpr int kLanes = 32;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float lo[kLanes], hi[kLanes];
  int nans[kLanes] = {};
  std::fill_n(lo, kLanes, kInfinity);
  std::fill_n(hi, kLanes, -kInfinity);
  auto const take = [&](int lane, float value) {
    lo[lane] = value < lo[lane] ? value : lo[lane];
    hi[lane] = value > hi[lane] ? value : hi[lane];
    nans[lane] += value != value;
  };
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) take(lane, x[i + lane]);
  }
  for (; i < count; ++i) take(0, x[i]);
  Range range{kInfinity, -kInfinity, false};
  for (int lane = 0; lane < kLanes; ++lane) {
    range = {std::min(range.lo, lo[lane]), std::max(range.hi, hi[lane]), range.has_nan || nans[lane] != 0};
  }
  return range;
}

}  // namespace

// A wrapper around the clones: gcc exports the resolver of a cloned function even if it is hidden.
Range range_of(float const* x, int count) { return measure_range(x, count); }

void read_row(void const* x, DType dtype, std::int64_t offset, int count, float* out) {
  switch (dtype) {
    case DType::kFloat16:
      return read_float16(static_cast<std::uint16_t const*>(x) + offset, count, out);
    case DType::kBFloat16:
      return read_bfloat16(static_cast<std::uint16_t const*>(x) + offset, count, out);
    default:
      std::copy_n(static_cast<float const*>(x) + offset, count, out);
  }
}

float const* as_float(void const* x, DType dtype, std::int64_t offset, int count, std::vector<float>& scratch) {
  if (dtype == DType::kFloat32) return static_cast<float const*>(x) + offset;
  scratch.resize(count);
  read_row(x, dtype, offset, count, scratch.data());
  return scratch.data();
}

void write_row(float const* row, int count, DType dtype, void* out, std::int64_t offset) {
  switch (dtype) {
    case DType::kFloat16:
      return write_float16(row, count, static_cast<std::uint16_t*>(out) + offset);
    case DType::kBFloat16:
      return write_bfloat16(row, count, static_cast<std::uint16_t*>(out) + offset);
    default:
      std::copy_n(row, count, static_cast<float*>(out) + offset);
  }
}

}  // namespace epiloq
