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

// The same with each matrix, 8 x 8 elements of 16 bits, transposed.
inline void ldmatrix_x4_transposed(unsigned (&r)[4], unsigned address) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = 0; i < 8; ++i) {
    unsigned const row = emulated::shuffle(address, i / 2 * 8 + lane % 4 * 2 + i % 2);
    std::uint16_t element;
    std::memcpy(&element, emulated::memory_at(row + lane / 4 * 2, sizeof element), sizeof element);
    r[i / 2] = i % 2 == 0 ? element : r[i / 2] | static_cast<unsigned>(element) << 16;
  }
}

}  // namespace epiloq::gemm
