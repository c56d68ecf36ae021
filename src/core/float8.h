#pragma once

// 8-bit floating-point formats and their scales, identical on host and device.

#include <bit>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define EPILOQ_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EPILOQ_HOST_DEVICE inline
#endif

namespace epiloq {

struct E4M3 {
  static constexpr float kMax = 448.f;
  static constexpr int kMantissaBits = 3, kBias = 7;
};
struct E5M2 {
  static constexpr float kMax = 57344.f;
  static constexpr int kMantissaBits = 2, kBias = 15;
};

constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// Clamps to the finite values and rounds, ties to even; NaN becomes 0x7f, as in the GPU's conversions.
template <class Format>
EPILOQ_HOST_DEVICE std::uint8_t encode(float x) {
  constexpr int kDropped = 23 - Format::kMantissaBits;
  constexpr std::uint32_t kLargest = std::bit_cast<std::uint32_t>(Format::kMax);
  constexpr std::uint32_t kSmallestNormal = (128u - Format::kBias) << 23;
  // Floats of this size have the spacing of the format's subnormals.
  constexpr std::uint32_t kShift = (128u + kDropped - Format::kBias) << 23;
  std::uint32_t const bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffffu;
  std::uint32_t const clamped = magnitude < kLargest ? magnitude : kLargest;
  std::uint32_t const rounded = clamped + (1u << (kDropped - 1)) - 1 + ((clamped >> kDropped) & 1);
  std::uint32_t const normal = (rounded >> kDropped) - ((127u - Format::kBias) << Format::kMantissaBits);
  std::uint32_t const subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(clamped) + std::bit_cast<float>(kShift)) - kShift;
  std::uint32_t const code = (clamped < kSmallestNormal ? subnormal : normal) | (bits >> 24 & 0x80u);
  return static_cast<std::uint8_t>(magnitude > kInfinityBits ? 0x7fu : code);
}

constexpr float kSmallestScale = 0x1p-126f;  // the smallest normal number

// How the largest magnitude becomes a scale.
struct ScaleRule {
  float const* upper = nullptr;  // amax is at most this,
  float eps = 0.f;               // and at least this
  bool power_of_two = false;     // rounded up to one
};

// `largest` is the format's. NaN stays NaN. Monotonic: the scale of a union is the largest of its parts' scales.
EPILOQ_HOST_DEVICE float scale_of(float amax, float largest, ScaleRule const& rule) {
  if (rule.upper != nullptr) amax = amax > *rule.upper ? *rule.upper : amax;
  amax = amax < rule.eps ? rule.eps : amax;
  float const step = amax / largest;
  float const scale = step < kSmallestScale ? kSmallestScale : step;
  if (!rule.power_of_two || !(scale < std::bit_cast<float>(kInfinityBits))) return scale;
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(scale) + 0x7fffffu) & kInfinityBits);
}

// A scale, and what dividing by it without a division needs.
struct Divisor {
  float scale, inverse;
  bool in_range;  // nothing below over- or underflows for quotients that matter
};

EPILOQ_HOST_DEVICE Divisor divide_by(float scale) {
  return {scale, 1.f / scale, scale >= 0x1p-80f && scale <= 0x1p100f};
}

// x / scale if in_range: correctly rounded for magnitudes between 2^-18 and 2^20, otherwise on the right side of these
// bounds with the right sign. x * inverse is off by at most one ulp; each step adds the remainder's share (Markstein).
// For significands of 8 and 11 bits one step was compared with division exhaustively; for 24 bits the first step leaves
// a faithful quotient, from which the second is proved to give the correctly rounded one. The remainder is taken
// negative so that -0 stays -0. Quotients known to be small, by a scale measured on the same values, need no check of
// their size.
template <int kSteps, bool kSmall = false>
EPILOQ_HOST_DEVICE float quotient(float x, Divisor const& d) {
  float const first = x * d.inverse;
  float result = first;
  for (int i = 0; i < kSteps; ++i) {
    float const excess = fmaf(result, d.scale, -x);
    result = fmaf(-excess, d.inverse, result);
  }
  return kSmall || fabsf(first) < 0x1p20f ? result : first;  // beyond that the steps may make NaN of an infinity
}

}  // namespace epiloq
