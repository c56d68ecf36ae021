#pragma once

#include <string>

#include "ops/conv2d_int8/kernels.h"

namespace epiloq::ops::conv2d_int8 {

// Throw Unsupported where this build has no kernel for the device or the problem.
void launch(Problem const& problem, int device, Stream stream);
std::string explain(Problem const& problem, int device);

}  // namespace epiloq::ops::conv2d_int8
