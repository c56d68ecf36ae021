#pragma once

#include "problems/quantizers/rms_norm.h"
#include "problems/quantizers/rms_norm_quant.h"
#include "problems/quantizers/silu_and_mul.h"
#include "problems/quantizers/silu_and_mul_quant.h"

namespace epiloq::ops {

namespace rms_norm {
void run_on_host(Problem const& problem, DType x, DType weight, int threads);
}

namespace rms_norm_quant {
void run_on_host(Problem const& problem, DType x, DType q, int threads);
}

namespace silu_and_mul {
void run_on_host(Problem const& problem, DType x, int threads);
}

namespace silu_and_mul_quant {
void run_on_host(Problem const& problem, DType x, DType q, int threads);
}

}  // namespace epiloq::ops
