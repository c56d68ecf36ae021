#pragma once

#include <string>

#include "ops/conv2d_weight_only/kernels.h"

namespace epiloq::ops::conv2d_weight_only {

// False, and nothing launched, where a dense convolution is to serve the problem.
bool launch(Problem const& problem, int device, Stream stream);
std::string explain(Problem const& problem, int device);

}  // namespace epiloq::ops::conv2d_weight_only
