#pragma once

#include <cstdint>

#include "epiloq/tensor.h"

namespace epiloq::ops::fp8_weight_mm {

struct Weight {
  std::int64_t n, k, stride;
  std::uint8_t const* q;
  float const* scale;
  std::int64_t block_rows, block_columns;  // at least 1, at most n and k rounded up to a K step
  std::int64_t scale_columns;              // of the scale matrix
};

struct Problem {
  Weight weight;
  std::int64_t m;
  void const* x;
  void* out;
  void const* bias;
  std::int64_t stride_x, stride_out;
};

// The decode kernel's limits: rows of x; its K step, of which blocks must be multiples; and what a lane loads at once,
// of which K must be a multiple.
inline constexpr int kMostTokens = 64, kDepth = 64, kLaneColumns = 16;

// On the CPU, for blocks of all columns or of 128 times a power of two, and of all rows or of a power of two.
bool has_host_blocks(Weight const& weight);
void multiply_on_host(Problem const& problem, DType x, int threads);
char const* describe_on_host(Problem const& problem, DType x);

void launch(Problem const& problem, DType x, int device, Stream stream);

// Rows of the weight, dense.
struct DequantizeProblem {
  Weight weight;
  std::int64_t first_row, rows;
  void* out;
  DType dtype;
};
void launch_dequantize(DequantizeProblem const& problem, int device, Stream stream);
void dequantize_on_host(DequantizeProblem const& problem, int threads);

}  // namespace epiloq::ops::fp8_weight_mm
