#pragma once

#include <cstdint>

namespace epiloq {

// Dynamic shared memory per CTA that limits an SM to `share` resident CTAs.
inline constexpr int kReservedPerCta = 1024;  // of an SM's shared memory, per CTA
constexpr int smem_for_ctas_per_sm(std::int64_t share, int shared_memory_per_block) {
  return (shared_memory_per_block + kReservedPerCta) / static_cast<int>(share + 1) - kReservedPerCta / 2;
}

}  // namespace epiloq
