#pragma once

#include <string>

#include "epiloq/tensor.h"

namespace epiloq::ops::weight_only_mm {

// A packed weight as kernels see it; sizes are whole panels and tiles.
//
// Kernels read it before the one launched before them has finished, and only then wait for that one
// (pdl_wait). That is safe as long as no kernel that lets the next one start early writes a packed
// weight: copies do not, nor do eager torch's element-wise kernels, which pack, and what follows one that does not
// starts when all that it wrote is there (PTX ISA, griddepcontrol: only where the one before uses launch_dependents has
// the next one to wait). epiloq's callers are told (epiloq/weight_only_mm.h).
struct Weight {
  int n, k, padded_k;
  int bits;
  int group;        // columns; at most padded_k
  int groups;       // that a panel has parameters for
  int group_shift;  // a group of 2^n times 128 columns: n; else 0
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
