#pragma once

// bfloat16 dot products of pairs, accumulated in float32 (AVX-512 BF16): a word of two columns for each of 16 rows, by
// one that is broadcast to all rows. Subnormal numbers count as 0.

#include "cpu/common/columns_by_tokens.h"
#include "cpu/common/rows.h"

namespace epiloq {

inline bool has_pairs() {
#ifdef EPILOQ_HAS_CLONES
  return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Whether the CPU also has byte lookups in tables of 64 or 128 (AVX-512 VBMI).
inline bool has_lookups() {
#ifdef EPILOQ_HAS_CLONES
  return has_pairs() && __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
}

// Token layout [block, pair of columns, token]: registers hold the sums of two blocks.
inline constexpr int kPairBlock = 12;

#ifdef EPILOQ_HAS_CLONES
// The first columns' upper halves become the lower ones.
[[gnu::always_inline]] inline void pair_of(Vectors<16>::Ints& out, Vectors<16>::Ints const& even,
                                           Vectors<16>::Ints const& odd) {
  out = (even >> 16 & 0xffff) | (odd & ~0xffff);
}

// (Through a variable: gcc keeps operands that an asm takes by reference in memory.)
[[gnu::always_inline]] inline void add_pair(Vectors<16>::Floats& sum, Vectors<16>::Floats const& rows,
                                            std::uint32_t const& x) {
  Vectors<16>::Floats onto = sum;
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(onto) : "v"(rows), "m"(x));
  sum = onto;
}

// The same of 16 words by as many.
[[gnu::always_inline]] inline void add_pairs(Vectors<16>::Floats& sum, Vectors<16>::Ints const& rows, Line const& x) {
  Vectors<16>::Floats onto = sum;
  asm("vdpbf16ps %2, %1, %0" : "+v"(onto) : "v"(rows), "m"(x));
  sum = onto;
}
#endif

}  // namespace epiloq
