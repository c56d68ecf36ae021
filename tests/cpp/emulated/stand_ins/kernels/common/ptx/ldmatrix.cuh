#pragma once

#include <cstring>

#include "machine.h"

namespace epiloq::gemm {

// Lane 8 i + j has the address of row j of matrix i.
inline void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = 0; i < 4; ++i) {
    unsigned const row = emulated::shuffle(address, 8 * i + lane / 4);
    std::memcpy(r + i, emulated::memory_at(row + lane % 4 * 4, 4), 4);
  }
}

}  // namespace epiloq::gemm
