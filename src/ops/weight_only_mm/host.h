#pragma once

// Pieces of the CPU's implementation.

#include "ops/weight_only_mm/kernels.h"
#include "ops/weight_only_mm/layout.h"

namespace epiloq::ops::weight_only_mm {

// The integers of a slab as rows [16, padded_k], from 0.
void unpack_slab(Weight const& weight, int slab, std::uint8_t* values);

struct Parameters {
  float scale, zero, offset;
};
Parameters parameters_at(Weight const& weight, int slab, int group, int row);

// Rows of 16-bit or 32-bit floats, from and to fp32.
void read_row(void const* values, DType dtype, std::int64_t first, int count, float* out);
void write_row(float const* row, int count, DType dtype, void* out, std::int64_t first);

}  // namespace epiloq::ops::weight_only_mm
