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

// On the CPU, for blocks of a multiple of 8 columns that end with a row; multiply_on_host is for few rows of x.
inline constexpr int kMostHostTokens = 8;
bool has_host_blocks(Weight const& weight);
void multiply_on_host(Problem const& problem, DType x, int threads);
void dequantize_on_host(Weight const& weight, void* out, DType dtype, int threads);

void launch(Problem const& problem, DType x, int device, Stream stream);
void launch_dequantize(Weight const& weight, void* out, DType dtype, int device, Stream stream);

}  // namespace epiloq::ops::table_mm
