#pragma once

// WGMMA wrappers: descriptors and the multiply instruction.

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED 1  // tiles of any multiple of 8 columns

#include <cstdint>
#include <cute/arch/mma_sm90.hpp>
#include <utility>

#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/common/ptx/shared_memory.cuh"
#include "kernels/common/ptx/tma.cuh"

namespace epiloq::gemm {

// The shared-memory descriptor of a tile whose rows are lines of the 128-byte swizzle: its low half, to which multiples
// of 16 bytes can be added as integers, and the whole.
__device__ __forceinline__ std::uint32_t swizzled_address(SharedAddress tile) { return (tile & 0x3ffff) >> 4; }
__device__ __forceinline__ std::uint64_t descriptor_of(std::uint32_t address) {
  constexpr std::uint32_t kSwizzle128 = 1, kEightRows = 1024;
  std::uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(address), "n"(kSwizzle128 << 30 | kEightRows >> 4));
  return descriptor;
}
__device__ __forceinline__ std::uint64_t swizzled_descriptor(SharedAddress tile) {
  return descriptor_of(swizzled_address(tile));
}

template <class Instruction, class Sum, std::size_t... kIndices>
__device__ __forceinline__ void wgmma_fma(std::uint64_t a, std::uint64_t b, Sum (&sums)[sizeof...(kIndices)], bool add,
                                          std::index_sequence<kIndices...>) {
  Instruction::fma(a, b, sums[kIndices]..., add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

}  // namespace epiloq::gemm
