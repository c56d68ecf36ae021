#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <utility>

#include "kernels/common/ptx/shared_memory.cuh"
#include "kernels/common/ptx/tma.cuh"

namespace epiloq::gemm {

inline std::uint32_t swizzled_address(SharedAddress tile) { return (tile & 0x3ffff) >> 4; }
inline std::uint64_t descriptor_of(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle128 = 1, kEightRows = 1024;
  return (kSwizzle128 << 30 | kEightRows >> 4) << 32 | address;
}

template <class Instruction, class Sum, std::size_t... kIndices>
void wgmma_fma(std::uint64_t a, std::uint64_t b, Sum (&sums)[sizeof...(kIndices)], bool add,
               std::index_sequence<kIndices...>) {
  static_assert(Instruction::kColumns == 2 * sizeof...(kIndices) && sizeof(Sum) == 4);
  emulated::multiply(Instruction::kElement, a, b, sums, Instruction::kColumns, add);
}

}  // namespace epiloq::gemm
