#pragma once

// Order of 2-bit and 3-bit values within a lane of a packed weight (packed_layout.h), and their conversion.
//
// A lane's block of 32 columns is two fragments of mma.sync m16n8k16, so eight pairs of neighbouring columns: pair n is
// register n % 4 of fragment n / 4. A pair's columns have the same bits in the lower and in the upper half of a 32-bit
// word, so that one AND isolates both. Below, bits are counted within a half.
//
// 2 bits: block b is word b; pair n is bits 2 n and 2 n + 1.
// 3 bits: block b is word b and, of word 2, byte b of each half. Pairs 0 to 4 are bits 3 n to 3 n + 2 of the word, and
//         pairs 5 and 6 bits 0 to 2 and 3 to 5 of the byte. Of pair 7 the lowest bit is bit 15 of the word, the others
//         bits 6 and 7 of the byte.
//
// A pattern is a pair isolated so: its values times 2^position, at most 255. As such it is a subnormal bfloat16 (or is
// in the first binade, whose spacing is the same) and a subnormal half, and a multiply-add by a power of two makes it a
// normal one.

#include <cstdint>

#include "epilogue/expr.h"

namespace epiloq::ops::weight_only_mm::narrow {

inline constexpr int kPairs = 8;  // of a block

// Words that hold a block: with 3 bits its own word, and word 2 shifted so that the block's bytes are the lower ones.
EPILOQ_HD constexpr int block_words(int bits) { return bits - 1; }

// Where a pair lies: bits `position` to `position` + bits - 1 of a word of the block >> shift.
struct Field {
  int word, shift, position;
};
EPILOQ_HD constexpr Field field_of(int bits, int pair) {
  if (bits == 2) return {0, pair / 4 * 8, pair % 4 * 2};
  constexpr Field kThreeBits[kPairs] = {{0, 0, 0},  {0, 0, 3}, {0, 6, 0}, {0, 6, 3},
                                        {0, 10, 2}, {1, 0, 0}, {1, 0, 3}, {0, 10, 5}};
  return kThreeBits[pair];
}
// Of a pair that two words share (pair 7 of 3 bits): bits from the second word, in place.
EPILOQ_HD constexpr std::uint32_t second_mask(int bits, int pair) { return bits == 3 && pair == 7 ? 0x00c000c0u : 0u; }
EPILOQ_HD constexpr std::uint32_t first_mask(int bits, int pair) {
  std::uint32_t const both = ((1u << bits) - 1) * 0x10001u;
  return (both << field_of(bits, pair).position) & ~second_mask(bits, pair);
}

EPILOQ_HD constexpr std::uint32_t pattern(int bits, std::uint32_t const* block, int pair) {
  Field const field = field_of(bits, pair);
  std::uint32_t const first = (block[field.word] >> field.shift) & first_mask(bits, pair);
  return second_mask(bits, pair) == 0 ? first : first | (block[1] & second_mask(bits, pair));
}

// The block's words from a lane's.
template <int kBits>
EPILOQ_HD constexpr void take_block(std::uint32_t* block, std::uint32_t const* lane, int b) {
  block[0] = lane[b];
  if constexpr (kBits == 3) block[1] = lane[2] >> (8 * b);
}

// Four bits per value in the order of packed_layout.h: a word per fragment, whose pair p is at bits 4 p.
template <int kBits>
EPILOQ_HD constexpr std::uint32_t widened(std::uint32_t const* block, int fragment) {
  std::uint32_t word = 0;
  for (int p = 0; p < 4; ++p) {
    int const pair = 4 * fragment + p, left = 4 * p - field_of(kBits, pair).position;
    std::uint32_t const found = pattern(kBits, block, pair);
    word |= left >= 0 ? found << left : found >> -left;
  }
  return word;
}

}  // namespace epiloq::ops::weight_only_mm::narrow
