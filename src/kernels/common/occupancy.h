#pragma once

#include <cstdint>

namespace epiloq {

// Shared memory that a block asks for, at least, so that an SM takes so many blocks and not one more.
inline constexpr int kReservedOfBlock = 1024;  // of an SM's shared memory, for each block
constexpr int bytes_for_share(std::int64_t share, int shared_memory_per_block) {
  return (shared_memory_per_block + kReservedOfBlock) / static_cast<int>(share + 1) - kReservedOfBlock / 2;
}

}  // namespace epiloq
