#pragma once

// Pieces of kernels that issue SM90's wgmma themselves.

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED 1  // tiles of any multiple of 8 columns

#include <cstdint>
#include <cute/arch/mma_sm90.hpp>
#include <utility>

namespace epiloq::gemm {

// Where wgmma finds a tile in shared memory whose rows are lines of the 128-byte swizzle.
__device__ __forceinline__ std::uint64_t swizzled_descriptor(unsigned tile) {
  constexpr std::uint64_t kSwizzle128 = 1, kEightRows = 1024;
  return kSwizzle128 << 62 | (kEightRows >> 4) << 32 | (tile & 0x3ffff) >> 4;
}

template <class Instruction, class Sum, std::size_t... kIndices>
__device__ __forceinline__ void multiply_once(std::uint64_t a, std::uint64_t b, Sum (&sums)[sizeof...(kIndices)],
                                              bool add, std::index_sequence<kIndices...>) {
  Instruction::fma(a, b, sums[kIndices]..., add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

}  // namespace epiloq::gemm
