#pragma once

#include "ops/weight_only_mm/kernels.h"
#include "ops/weight_only_mm/select.h"

namespace epiloq::ops::weight_only_mm {

void launch(Choice const& choice, Problem const& problem, DType x, int device, Stream stream);

}  // namespace epiloq::ops::weight_only_mm
