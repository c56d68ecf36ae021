#pragma once

// Reads a packed weight value by value, as packed_layout.h and narrow_codes.h define it.

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/half.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::weight_only_mm {

constexpr int lane_values(int bits) { return kPanelRows * depth(bits) / kLanes; }

// A 3-bit value of a half of the block's own word and of its byte.
constexpr int three_bits(int own, int byte, int pair) {
  if (pair < 5) return own >> (3 * pair) & 7;
  if (pair < 7) return byte >> (3 * (pair - 5)) & 7;
  return own >> 15 | (byte >> 6) << 1;
}

// The stored value i of a lane, counted from 0.
constexpr int value_at(std::uint8_t const* lane, int bits, int i) {
  if (bits == 8) return lane[i];
  if (bits == 4) return lane[i / 2] >> (i % 2 * 4) & 15;
  int const block = i / 16, pair = i % 16 / 2, byte = i % 2 * 2;  // of a word, whose half is the pair's column
  auto const half_word = [&](int word) { return lane[4 * word + byte] | lane[4 * word + byte + 1] << 8; };
  if (bits == 2) return half_word(block) >> (2 * pair) & 3;
  return three_bits(half_word(block), half_word(2) >> (8 * block) & 0xff, pair);
}

// FP4, by scale groups per K step.
constexpr int kMxfp4 = 4, kNvfp4 = 8;
constexpr int kNanPower = 255, kNanScale = 0x7e00 >> 7;

constexpr double e2m1(int code) {
  constexpr double kNumbers[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kNumbers[code & 7] : kNumbers[code];
}

// What a stored scale means: 2^(byte - 127); or bits 7 to 14 of 128 times the scale as a half.
inline double fp4_scale(int kind, int byte) {
  if (kind == kMxfp4) return byte == kNanPower ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1., byte - 127);
  return float_of_float16(static_cast<std::uint16_t>(byte << 7)) / 128.;
}

// The stored bytes of all E4M3 numbers above 0: 2^-9 to 448.
inline std::vector<int> nvfp4_bytes() {
  std::vector<int> bytes;
  for (int code = 1; code < 127; ++code) {
    int const exponent = code >> 3, fraction = code & 7;
    double const scale = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    bytes.push_back(float16_of_float(static_cast<float>(128 * scale)) >> 7);
  }
  return bytes;
}

}  // namespace epiloq::ops::weight_only_mm
