#pragma once

namespace cutlass {

struct float_e4m3_t;
struct float_e5m2_t;

}  // namespace cutlass
