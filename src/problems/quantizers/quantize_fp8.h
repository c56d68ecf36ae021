#pragma once

#include "core/float8.h"
#include "epiloq/granularity.h"
#include "epiloq/tensor.h"

namespace epiloq::ops::quantize_fp8 {

// Each tile of tile_rows x tile_cols elements has a scale; the last ones along a row or column may be smaller.
struct Problem {
  int rows, cols, padded_cols;
  int tile_rows, tile_cols, tiles;  // tiles: along a row
  std::int64_t stride_x, stride_q;
  std::int64_t scale_row, scale_col;  // strides of the scales
  void const* x;
  std::uint8_t* q;
  float* scale;
  ScaleRule rule;
  Granularity granularity;
  bool is_static;
};

void launch(Problem const& problem, DType x, DType q, int device, Stream stream);
void run_on_host(Problem const& problem, DType x, DType q);

}  // namespace epiloq::ops::quantize_fp8
