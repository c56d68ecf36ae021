#pragma once

#include "gemm/config.h"
#include "gemm/problem.h"
#include "ops/scaled_mm/select.h"

namespace epiloq::ops::scaled_mm {

// The architecture whose kernels a device runs (the forced one, where one is) and the device's sizes.
Target target_of_device(int device, bool is_float8);

// `constant_b`: see epiloq/scaled_mm.h.
void launch(Choice const& choice, gemm::Types types, bool has_zero_point, gemm::Problem problem, int device,
            Stream stream, bool constant_b = false);

}  // namespace epiloq::ops::scaled_mm
