#pragma once

// Reads a packed weight value by value, as packed_layout.h and narrow_codes.h define it.

#include <cstdint>

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

}  // namespace epiloq::ops::weight_only_mm
