#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>

namespace epiloq::ops::weight_only_mm {

using Word = std::uint32_t;

namespace emulation {

inline std::uint16_t bits_of(__half, float value) { return float16_of_float(value); }
inline std::uint16_t bits_of(__nv_bfloat16, float value) { return bfloat16_of_float(value); }
template <class T>
double value_of(Word pair, int half) {
  return static_cast<float>(T{static_cast<std::uint16_t>(pair >> (16 * half))});
}

// Conversions of integers are exact: fails where T does not represent a result.
template <class T, class Operation>
Word of_pairs(Operation const& operation) {
  Word result = 0;
  for (int half = 0; half < 2; ++half) {
    double const exact = operation(half);
    Word const bits = bits_of(T{}, static_cast<float>(exact));
    if (value_of<T>(bits, 0) != exact && !std::isnan(exact))
      throw emulated::Failure("a pair of 16-bit floats was rounded");
    result |= bits << (16 * half);
  }
  return result;
}

}  // namespace emulation

inline Word masked_or(Word a, Word mask, Word power) { return (a & mask) | power; }
inline Word subtract(Word a, Word b) {
  using emulation::value_of;
  return emulation::of_pairs<__half>([&](int i) { return value_of<__half>(a, i) - value_of<__half>(b, i); });
}
template <class T>
Word multiply_add_pairs(Word a, Word b, Word c) {
  using emulation::value_of;
  return emulation::of_pairs<T>([&](int i) { return value_of<T>(a, i) * value_of<T>(b, i) + value_of<T>(c, i); });
}

// m16n8k16 by the PTX ISA's table of fragments; products are added up exactly, then rounded.
template <class T>
void mma(float (&d)[4], Word const (&a)[4], Word b0, Word b1, float const (&c)[4]) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  Word const b[2] = {b0, b1};
  double sums[4] = {c[0], c[1], c[2], c[3]};
  for (int t = 0; t < 4; ++t) {  // columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of K
    for (int upper = 0; upper < 2; ++upper) {
      Word rows[2], columns[2];
      for (int i = 0; i < 2; ++i) rows[i] = emulated::shuffle(a[2 * upper + i], lane / 4 * 4 + t);
      for (int i = 0; i < 2; ++i) columns[i] = emulated::shuffle(b[upper], (lane % 4 * 2 + i) * 4 + t);
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          sums[i] += emulation::value_of<T>(rows[i / 2], half) * emulation::value_of<T>(columns[i % 2], half);
        }
      }
    }
  }
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(sums[i]);
}

}  // namespace epiloq::ops::weight_only_mm
