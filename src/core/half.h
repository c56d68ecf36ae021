#pragma once

// 16-bit floats on the host, by bits: the compiler's own _Float16 would require a new libgcc.

#include <bit>
#include <cstdint>

namespace epiloq {

inline float float_of_bfloat16(std::uint16_t x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }

// The multiplication adjusts the exponent's bias and normalises subnormals.
inline float float_of_float16(std::uint16_t x) {
  std::uint32_t const magnitude = (x & 0x7fffu) << 13;
  std::uint32_t const moved = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  std::uint32_t const bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : moved;
  return std::bit_cast<float>(bits | (x & 0x8000u) << 16);
}

// Rounds to nearest, ties to even.
inline std::uint16_t bfloat16_of_float(float x) {
  std::uint32_t const bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline std::uint16_t float16_of_float(float x) {
  constexpr std::uint32_t kOverflow = 0x477ff000u;  // 65520, which rounds to infinity
  constexpr std::uint32_t kNormal = 0x38800000u;    // 2^-14
  std::uint32_t const sign = std::bit_cast<std::uint32_t>(x) >> 16 & 0x8000u;
  std::uint32_t const magnitude = std::bit_cast<std::uint32_t>(x) & 0x7fffffffu;
  std::uint32_t half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  // Near 0.5 a float's ulp is 2^-24, a subnormal half's.
  if (magnitude < kNormal) half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  if (magnitude >= kOverflow) half = 0x7c00u;
  if (x != x) half = 0x7e00u;
  return static_cast<std::uint16_t>(sign | half);
}

}  // namespace epiloq
