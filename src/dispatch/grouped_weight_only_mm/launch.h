#pragma once

#include "dispatch/grouped_weight_only_mm/select.h"

namespace epiloq::ops::grouped_weight_only_mm {

void launch(Choice const& choice, Problem const& problem, DType x, int device, Stream stream);

}  // namespace epiloq::ops::grouped_weight_only_mm
