#pragma once

#include <algorithm>
#include <cstdint>

#include "epiloq/tensor.h"
#include "problems/conv2d_geometry.h"

namespace epiloq::ops::conv2d_int8 {

// The epilogue: include/epiloq/conv2d_int8.h has the formula.
struct Finish {
  float const* scale;
  bool scale_is_vector;
  std::int32_t const* correction;  // null: 0
  float const* bias;               // null: 0
  int output_zero;
  float lo, hi;
};

struct Problem {
  conv2d::Shape shape;
  std::int8_t const* x;
  std::int8_t const* weight;
  void* out;
  DType out_dtype;
  int input_zero;
  Finish finish;
};

// Whether runs of `count` output channels start on a multiple of their bytes, or of 16.
inline bool has_whole_runs(Problem const& p, int count) {
  std::int64_t const size = size_of(p.out_dtype), bytes = std::min<std::int64_t>(count * size, 16);
  bool const in_groups =
      p.shape.groups == 1 || p.shape.ci == p.shape.groups || p.shape.co / p.shape.groups % count == 0;
  return in_groups && reinterpret_cast<std::uintptr_t>(p.out) % bytes == 0 && p.shape.out_pixel * size % bytes == 0;
}

// acc is [rows, co]; `out_pixel` elements between the outputs of two pixels.
void finish_on_host(std::int32_t const* acc, std::int64_t rows, int co, Finish const& finish, DType out_dtype,
                    void* out, std::int64_t out_pixel);

}  // namespace epiloq::ops::conv2d_int8
