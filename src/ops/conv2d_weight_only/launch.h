#pragma once

#include "core/target.h"
#include "ops/conv2d_weight_only/kernels.h"

namespace epiloq::ops::conv2d_weight_only {

// False, and nothing launched, where a dense convolution is to serve the problem.
bool launch(Problem const& problem, int device, Stream stream);

// The architecture whose kernels a device runs, and its sizes; of the CPU, the forced architecture's first card.
Target target_of(Device device);

}  // namespace epiloq::ops::conv2d_weight_only
