#include "core/host_rows.h"

#include <bit>

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
