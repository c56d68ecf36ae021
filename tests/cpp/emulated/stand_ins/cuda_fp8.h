#pragma once

// Named, not used: outputs of kernels that are not emulated.
#include <cuda_runtime_api.h>

struct __nv_fp8_e4m3;
struct __nv_fp8_e5m2;
