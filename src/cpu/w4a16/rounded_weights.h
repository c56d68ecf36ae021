#pragma once

// Low-bit weights as lines of bfloat16, rounded with their scales: 32 columns of a row in the order in which they
// lie. For many tokens of that type, whose products then need no sums of their groups.

#include "cpu/isa/vectors.h"
#include "cpu/w4a16/e2m1.h"
#include "cpu/w4a16/weight_only.h"

namespace epiloq::ops::weight_only_mm {

#ifdef EPILOQ_HAS_CLONES
struct RoundedWeights {
  using Floats = Vectors<16>::Floats;
  using Ints = Vectors<16>::Ints;
  typedef std::int8_t Bytes __attribute__((vector_size(64)));
  typedef std::uint16_t Halves __attribute__((vector_size(64)));
  static constexpr int kRowBytes = 64;

  // Converts a row's integers or E2M1 numbers of a group to weights.
  struct Meaning {
    float scale, zero, offset;
    [[gnu::always_inline]] Meaning(PackedPanel const& p, int at)
        : scale(p.scale[at]), zero(p.zero[at]), offset(p.offset[at]) {}
    [[gnu::always_inline]] void of(Floats& values) const { values = (values - zero) * scale + offset; }
  };

  // 16 values, then 16 more. (By way of variables: gcc keeps what an asm names by reference in memory.)
  [[gnu::always_inline]] static void round(Halves& out, Floats const& first, Floats const& second) {
    Floats const a = first, b = second;
    Halves both;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(a), "v"(b));
    out = both;
  }

  // 4 bits, 64 columns: rows g in the lower halves of bytes, g + 8 in the higher. Groups of eight bytes belong
  // alternately to the first and the last 32 columns. A row's weights of a group have one of 16 values, which are
  // looked up for both groups, lower and upper bytes separately.
  [[gnu::always_inline]] static void widen4(std::uint8_t const* q, PackedPanel const& p, bool is_fp4, int group,
                                            int next, int stride, Line* out) {
    typedef std::uint64_t Quads __attribute__((vector_size(64)));
    constexpr std::uint64_t kSecond = 0x1010101010101010u;
    Floats numbers;
    for (int i = 0; i < 16; ++i) numbers[i] = is_fp4 ? kE2m1[i] : static_cast<float>(i);
#pragma GCC unroll 2
    for (int g = 0; g < kPanelRows / 2; ++g) {
      Ints pair;
      load(pair, q + g * kRowBytes);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        int const row = g + half * kPanelRows / 2;
        Floats of_group = numbers, of_next = numbers;
        Meaning(p, group + parameter_of(row)).of(of_group), Meaning(p, next + parameter_of(row)).of(of_next);
        Halves values;
        round(values, of_group, of_next);
        Bytes const at = (Bytes)((Quads)((half == 0 ? pair : pair >> 4) & 0x0f0f0f0f) |
                                 Quads{0, kSecond, 0, kSecond, 0, kSecond, 0, kSecond});
        Halves const upper_bytes = values >> 8;
        Bytes lower, upper, low, high, lines[2];
        asm("vpmovwb %1, %t0" : "=v"(lower) : "v"(values));
        asm("vpmovwb %1, %t0" : "=v"(upper) : "v"(upper_bytes));
        asm("vpermb %2, %1, %0" : "=v"(low) : "v"(at), "v"(lower));
        asm("vpermb %2, %1, %0" : "=v"(high) : "v"(at), "v"(upper));
        asm("vpunpcklbw %2, %1, %0" : "=v"(lines[0]) : "v"(low), "v"(high));
        asm("vpunpckhbw %2, %1, %0" : "=v"(lines[1]) : "v"(low), "v"(high));
        std::memcpy(out + row, lines, sizeof(Line)), std::memcpy(out + stride + row, lines + 1, sizeof(Line));
      }
    }
  }

  // 8 bits, 32 columns: twos of row g, then of g + 8, in each word.
  [[gnu::always_inline]] static void widen8(std::uint8_t const* q, PackedPanel const& p, int group, Line* out) {
    Halves in_twos;
    for (int i = 0; i < 32; ++i) in_twos[i] = static_cast<std::uint16_t>(i / 2 + i % 2 * 16);
#pragma GCC unroll 2
    for (int g = 0; g < kPanelRows / 2; ++g) {
      Ints words;
      load(words, q + g * kRowBytes);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        int const row = g + half * kPanelRows / 2;
        Meaning const meaning(p, group + parameter_of(row));
        Floats even = __builtin_convertvector(words >> (16 * half) & 0xff, Floats);
        Floats odd = __builtin_convertvector(words >> (16 * half + 8) & 0xff, Floats);
        meaning.of(even), meaning.of(odd);
        Halves values;
        round(values, even, odd);
        Halves const line = __builtin_shuffle(values, in_twos);
        std::memcpy(out + row, &line, sizeof(line));
      }
    }
  }
};
#endif

}  // namespace epiloq::ops::weight_only_mm
