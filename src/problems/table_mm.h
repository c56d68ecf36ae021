#pragma once

#include <cstdint>

#include "epiloq/tensor.h"

namespace epiloq::ops::table_mm {

struct Weight {
  std::int64_t n, k, block_size;
  std::uint8_t const* codes;
  float const *table, *scale;
};

struct Problem {
  Weight weight;
  std::int64_t m;
  void const* x;
  void* out;
  void const* bias;
  std::int64_t stride_x, stride_out;
};

// The decode kernel's limits: rows of x; and its K step, of whose multiple blocks and K must be.
inline constexpr int kMostTokens = 64, kDepth = 64;

void launch(Problem const& problem, DType x, int device, Stream stream);
void launch_dequantize(Weight const& weight, void* out, DType dtype, int device, Stream stream);

}  // namespace epiloq::ops::table_mm
