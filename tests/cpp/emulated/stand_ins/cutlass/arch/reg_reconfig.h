#pragma once

namespace cutlass::arch {

template <int kRegisters>
void warpgroup_reg_alloc() {}
template <int kRegisters>
void warpgroup_reg_dealloc() {}

}  // namespace cutlass::arch
