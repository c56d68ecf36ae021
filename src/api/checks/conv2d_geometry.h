#pragma once

#include "core/checks.h"
#include "epiloq/conv2d.h"
#include "problems/conv2d_geometry.h"

namespace epiloq::ops::conv2d {

struct Kernel {
  std::int64_t co, kh, kw, channels;  // channels: per group
};

// Checks x, out and the geometry against each other and the kernel.
Shape checked_shape(Checker const& check, TensorView const& out, TensorView const& x, Kernel const& kernel,
                    Conv2dGeometry const& geometry);

}  // namespace epiloq::ops::conv2d
