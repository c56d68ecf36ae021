#pragma once

#include <cstdint>

namespace epiloq {

// Shared memory that a block asks for, at least, so that an SM takes so many blocks and not one more.
inline constexpr int kReservedPerCta = 1024;  // of an SM's shared memory, for each block
constexpr int smem_for_ctas_per_sm(std::int64_t share, int shared_memory_per_block) {
  return (shared_memory_per_block + kReservedPerCta) / static_cast<int>(share + 1) - kReservedPerCta / 2;
}

}  // namespace epiloq
