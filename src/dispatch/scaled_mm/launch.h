#pragma once

#include "dispatch/scaled_mm/select.h"
#include "kernels/common/tile_config.h"
#include "problems/gemm.h"

namespace epiloq::ops::scaled_mm {

// `constant_b`: see epiloq/scaled_mm.h.
void launch(Choice const& choice, gemm::Types types, gemm::Problem problem, int device, Stream stream,
            bool constant_b = false);

}  // namespace epiloq::ops::scaled_mm
