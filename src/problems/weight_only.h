#pragma once

#include <string>

#include "epiloq/tensor.h"

namespace epiloq::ops::weight_only_mm {

// A packed weight; sizes are whole panels and tiles.
//
// Kernels read the weight before pdl_wait. Unsafe if a preceding kernel that triggers programmatic dependent launch may
// still be writing it. Copies and eager torch's elementwise kernels, which pack weights, do not trigger; after a kernel
// that does not, the next one starts only when all writes are visible (PTX ISA, griddepcontrol).
// epiloq/weight_only_mm.h tells callers.
struct Weight {
  int n, k, padded_k;
  int bits;
  int group;        // columns; at most padded_k
  int groups;       // scale groups per panel
  int group_shift;  // group = 2^n times 128 columns: n; else 0
  std::uint8_t const* q;
  void const* scale;
  std::uint8_t const* zero;  // null: 2^(bits - 1)
  void const* offset;        // null: none
  DType scale_dtype;
};

struct Problem {
  Weight weight;
  int m;
  std::int64_t stride_x, stride_out;
  void const* x;
  void* out;
  void const* bias;
  float lo, hi;
};

struct DequantizeProblem {
  Weight weight;
  void* out;
  DType out_dtype;
};

void launch_dequantize(DequantizeProblem const& problem, int device, Stream stream);
void dequantize_on_host(DequantizeProblem const& problem);

void multiply_on_host(Problem const& problem, DType x, int threads);
std::string describe_on_host(Problem const& problem, DType dtype);

}  // namespace epiloq::ops::weight_only_mm
