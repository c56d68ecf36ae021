#pragma once

#include "ops/conv2d_weight_only/kernels.h"
#include "ops/conv2d_weight_only/select.h"

namespace epiloq::ops::conv2d_weight_only {

// Of any family but kDense.
void launch(Choice const& choice, Problem const& problem, int device, Stream stream);

// The architecture whose kernels a device runs, and its sizes; of the CPU, the forced architecture's first card.
Target target_of(Device device);

}  // namespace epiloq::ops::conv2d_weight_only
