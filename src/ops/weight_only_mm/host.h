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

// Products with 4 bits and groups of 32 columns or a multiple.
bool multiplies4(Weight const& weight);
void multiply4_on_host(Problem const& problem, DType x);

}  // namespace epiloq::ops::weight_only_mm
