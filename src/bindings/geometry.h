#pragma once

#include "bindings/dlpack.h"
#include "epiloq/conv2d.h"

namespace epiloq::bindings {

using Pair = std::array<std::int64_t, 2>;
using Sides = std::array<std::int64_t, 4>;

}  // namespace epiloq::bindings
