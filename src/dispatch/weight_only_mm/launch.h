#pragma once

#include "dispatch/weight_only_mm/select.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

void launch(Choice const& choice, Problem const& problem, DType x, int device, Stream stream);

}  // namespace epiloq::ops::weight_only_mm
