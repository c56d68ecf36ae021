#pragma once

#include "ops/weight_only_mm/kernels.h"
#include "ops/weight_only_mm/select.h"

namespace epiloq::ops::weight_only_mm {

// The architecture whose kernels a device runs (the forced one, where one is) and the device's sizes.
Target target_of_device(int device);

void launch(Choice const& choice, Problem const& problem, DType x, int device, Stream stream);

}  // namespace epiloq::ops::weight_only_mm
