#pragma once

// Packed FP4 codes as rows: four words of a lane, exchanged among four lanes, are 16 neighbouring columns of rows g and
// g + 8 (a run; problems/packed_layout.h). Host code too, so that tests can check every code.

#include <bit>
#include <cstdint>
#include <limits>

#include "core/float8.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::ops::dequantize_fp4 {

using Word = std::uint32_t;

inline constexpr int kRun = 16;  // columns

// PRMT: byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes of a and b, whose bits 3 are 0.
EPILOQ_HOST_DEVICE Word permuted(Word a, Word b, Word selector) {
#ifdef __CUDA_ARCH__
  Word result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
#else
  std::uint64_t const bytes = std::uint64_t{b} << 32 | a;
  Word result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<Word>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
#endif
}

// Columns 4 q to 4 q + 3 of a run, in the order of columns 0, 2, 1, 3: a byte each, row g in its low half.
EPILOQ_HOST_DEVICE Word quad_of(Word const (&run)[4], int q) {
  return permuted(run[q % 2 * 2], run[q % 2 * 2 + 1], q < 2 ? 0x6240 : 0x7351);
}

// A code in the low half of a byte of a quad, as a number: exponent and fraction become the low exponent bits and the
// upper fraction bits of a float, subnormal where the code is.
EPILOQ_HOST_DEVICE float number_at(Word quad, int column, int row) {
  constexpr int kByte[4] = {0, 2, 1, 3};
  Word const code = quad >> (8 * kByte[column] + 4 * row);
  return std::bit_cast<float>((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}

// E2M1 magnitudes times a power of two as eight bytes of E4M3.
struct Magnitudes {
  Word low, high;
};

// The quad's numbers of a row as E4M3, in the order of columns.
EPILOQ_HOST_DEVICE Word float8_of(Word quad, int row, Magnitudes const& magnitudes) {
  Word const low = (row == 0 ? quad : quad >> 4) & 0x07070707u;
  // Nibbles of bytes 0, 2, 1 and 3.
  Word const of_codes = permuted(magnitudes.low, magnitudes.high, low | low >> 12);
  Word const ordered = permuted(quad, 0, 0x3120);
  return of_codes | ((row == 0 ? ordered << 4 : ordered) & 0x80808080u);
}

// A row's scale in E4M3: its largest exponent, of a block with a code other than 0, becomes 2^6, as 6 * 2^6 is at most
// 448. Exponents from 2^-8 on keep every code, and below 2^-12 all of them are rounded to 0.
inline constexpr int kLargestExponent = 6, kZeroExponent = -13, kExponents = kLargestExponent - kZeroExponent + 1;
inline constexpr int kE8m0Nan = 255, kE8m0One = 127;

// Which of kExponents a block of scale byte `e` has in a row of largest byte `largest`. Larger ones have only zeros.
EPILOQ_HOST_DEVICE int exponent_index(int e, int largest) {
  int const index = e - largest + kExponents - 1;
  return index < 0 ? 0 : index < kExponents ? index : kExponents - 1;
}
EPILOQ_HOST_DEVICE std::uint8_t magnitude_of(int index, int code) {
  float const power = std::bit_cast<float>(static_cast<Word>(kE8m0One + kZeroExponent + index) << 23);
  return encode<E4M3>(std::bit_cast<float>(static_cast<Word>(code) << 22) * 0x1p126f * power);
}

EPILOQ_HOST_DEVICE float e8m0_number(int byte) {
  if (byte == kE8m0Nan) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(byte == 0 ? Word{1} << 22 : static_cast<Word>(byte) << 23);
}
// An NVFP4 scale as stored: bits 7 to 14 of 128 times the scale as a half. 2^105 is 2^112, which converts a half's
// exponent to a float's, divided by 128.
EPILOQ_HOST_DEVICE float nvfp4_number(int byte) {
  constexpr int kInfiniteHalf = 0x7c00 >> 7;
  if (byte >= kInfiniteHalf) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(static_cast<Word>(byte) << 20) * 0x1p105f;
}

}  // namespace epiloq::ops::dequantize_fp4
