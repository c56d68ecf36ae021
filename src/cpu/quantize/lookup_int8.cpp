// Table lookups on the CPU: 64 at a time with the 128-byte permutation of AVX-512 VBMI, which compilers do not generate
// from a loop.

#include "cpu/quantize/lookup_int8.h"

#include <algorithm>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define EPILOQ_HAS_VBMI_TARGET 1
#endif

namespace epiloq::ops::lookup_int8 {
namespace {

void look_up_each(std::int8_t const* x, std::int64_t count, std::int8_t const* table, std::int8_t* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = table[static_cast<std::uint8_t>(x[i])];
}

#ifdef EPILOQ_HAS_VBMI_TARGET
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) void look_up_64(std::int8_t const* x, std::int64_t count,
                                                                       std::int8_t const* table, std::int8_t* out) {
  __m512i part[4];
  for (int i = 0; i < 4; ++i) part[i] = _mm512_loadu_si512(table + 64 * i);
  for (std::int64_t i = 0; i < count; i += 64) {
    __mmask64 const some = count - i < 64 ? (std::uint64_t{1} << (count - i)) - 1 : ~std::uint64_t{0};
    __m512i const bits = _mm512_maskz_loadu_epi8(some, x + i);
    // The permutations use seven bits of the index.
    __m512i const positive = _mm512_permutex2var_epi8(part[0], bits, part[1]);
    __m512i const negative = _mm512_permutex2var_epi8(part[2], bits, part[3]);
    _mm512_mask_storeu_epi8(out + i, some, _mm512_mask_blend_epi8(_mm512_movepi8_mask(bits), positive, negative));
  }
}
#endif

}  // namespace

void lookup(std::int8_t const* x, std::int64_t count, std::int8_t const* table, std::int8_t* out) {
#ifdef EPILOQ_HAS_VBMI_TARGET
  if (__builtin_cpu_supports("avx512vbmi")) return look_up_64(x, count, table, out);
#endif
  look_up_each(x, count, table, out);
}

}  // namespace epiloq::ops::lookup_int8
