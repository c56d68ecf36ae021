#pragma once

#include "dispatch/grouped_packed_mm/select.h"

namespace epiloq::ops::grouped_packed_mm {

void launch(Choice const& choice, Problem const& problem, DType x, int device, Stream stream);

}  // namespace epiloq::ops::grouped_packed_mm
