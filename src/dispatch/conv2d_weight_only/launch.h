#pragma once

#include "dispatch/conv2d_weight_only/select.h"
#include "problems/conv2d_weight_only.h"

namespace epiloq::ops::conv2d_weight_only {

// For every family but kDense.
void launch(Choice const& choice, Problem const& problem, int device, Stream stream);

}  // namespace epiloq::ops::conv2d_weight_only
