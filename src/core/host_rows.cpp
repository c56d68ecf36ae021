#include "core/host_rows.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace epiloq {
namespace {

EPILOQ_CLONES void widen_bfloat16(std::uint16_t const* x, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(x[i]) << 16);
}

// By bits: the compiler's own _Float16 would tie the library to a new libgcc. The multiplication moves the exponent's
// bias and normalises subnormals.
EPILOQ_CLONES void widen_float16(std::uint16_t const* x, int count, float* out) {
  for (int i = 0; i < count; ++i) {
    std::uint32_t const magnitude = (x[i] & 0x7fffu) << 13;
    std::uint32_t const bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    std::uint32_t const not_finite = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : bits;
    out[i] = std::bit_cast<float>(not_finite | (x[i] & 0x8000u) << 16);
  }
}

}  // namespace

// Lanes that do not meet until the end: compilers may not reorder a float minimum by themselves.
EPILOQ_CLONES Range range_of(float const* x, int count) {
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

float const* as_float(void const* x, DType dtype, std::int64_t offset, int count, std::vector<float>& scratch) {
  if (dtype == DType::kFloat32) return static_cast<float const*>(x) + offset;
  scratch.resize(count);
  auto const* const halves = static_cast<std::uint16_t const*>(x) + offset;
  if (dtype == DType::kFloat16) {
    widen_float16(halves, count, scratch.data());
  } else {
    widen_bfloat16(halves, count, scratch.data());
  }
  return scratch.data();
}

}  // namespace epiloq
