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

}  // namespace epiloq::ops::weight_only_mm
