#pragma once

// Dynamic shared memory that limits the resident CTAs per SM.

#include <cstdint>

namespace epiloq {

// Dynamic shared memory per CTA that limits an SM to `share` resident CTAs.
inline constexpr int kReservedPerCta = 1024;  // of an SM's shared memory, per CTA
constexpr int smem_for_ctas_per_sm(std::int64_t share, int shared_memory_per_block) {
  return (shared_memory_per_block + kReservedPerCta) / static_cast<int>(share + 1) - kReservedPerCta / 2;
}

// The same for CTAs that need `own` bytes. If they start while the previous kernel's CTAs still run (PDL), most of them
// would be placed on the SMs that are free first; padded shared memory spreads them evenly. Not if every SM gets the
// same number anyway: the next kernel's CTAs can then use the rest of shared memory.
constexpr int smem_that_spreads(int own, std::int64_t ctas, int sm_count, int shared_memory_per_block) {
  if (ctas % sm_count == 0) return own;
  int const padded = smem_for_ctas_per_sm((ctas + sm_count - 1) / sm_count, shared_memory_per_block);
  return own > padded ? own : padded;
}

}  // namespace epiloq
