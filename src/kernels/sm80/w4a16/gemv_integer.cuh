#pragma once

// GEMV for one or two tokens on integer tensor cores. Converting 4-bit weights to 16-bit floats takes longer than
// reading them, but 8-bit integers are a mask away. So the tokens become integers: 128 columns of a token are 31-bit
// integers times a power of two, which rounds what is below 2^-30 of the largest, multiplied exactly as four 8-bit
// digits, each one of the tensor cores' eight columns. (Splitting into exact products of few bits: Ozaki, Ogita, Oishi
// and Rump, Numerical Algorithms 59, 2012.)

#include <cstdint>
#include <type_traits>

#include "kernels/common/w4a16/config.h"
#include "kernels/sm80/w4a16/warp_tile.cuh"

namespace epiloq::ops::weight_only_mm {

// Packed integers to A fragments of mma.sync m16n8k32, of 32 columns: q minus the middle of its range, times kUnit. A
// register's four columns are 2 t, 2 t + 8, 2 t + 1 and 2 t + 9 of 16.
template <int kBits>
struct IntegerFragment;

template <>
struct IntegerFragment<4> {
  static constexpr int kUnitExponent = 4, kMiddle = 8;
  // The upper half of each byte, signed, in one LOP3; the compiler emits two.
  static __device__ __forceinline__ Word upper(Word w) {
    Word result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(w), "r"(0xf0f0f0f0u), "r"(0x80808080u));
    return result;
  }
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[2 * half] = upper(w[half] << 4);
      a[2 * half + 1] = upper(w[half]);
    }
  }
};

template <>
struct IntegerFragment<8> {
  static constexpr int kUnitExponent = 0, kMiddle = 128;
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Word const first = w[2 * half] ^ 0x80808080u, second = w[2 * half + 1] ^ 0x80808080u;
      a[2 * half] = __byte_perm(first, second, 0x5140);
      a[2 * half + 1] = __byte_perm(first, second, 0x7362);
    }
  }
};

// D += A B.
__device__ __forceinline__ void mma(int (&d)[4], Word const (&a)[4], Word b0, Word b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned largest_of_lanes(unsigned value) {
  asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(value));
  return value;
}

template <class T>
__device__ __forceinline__ float2 floats_of(Word pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<__half2 const*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

// A K step of one or two tokens. Column 4 token + digit of the tensor cores holds a digit, the lowest first. Shared
// memory is [token][digit][t][block of 16 columns], words of the block's four columns that lane t needs in a fragment.
template <class T>
struct TokenDigits {
  static constexpr int kDigits = 4, kWords = kStep / 16, kBytes = kIntegerBytes;
  static_assert(kBytes == kDigits * kStep);
  static constexpr unsigned kExponentMask = 0x7f800000u, kExponentOne = 1u << 23;
  static constexpr int kLargest = 29;  // bits below the largest integer's leading one

  // The scale that brings the largest of a token's columns to at least 2^kLargest, as exponent bits; values too small
  // for such a float keep fewer digits.
  static __device__ __forceinline__ unsigned exponent_of(float const (&x)[4]) {
    float const most = max_nan(max_nan(fabsf(x[0]), fabsf(x[1])), max_nan(fabsf(x[2]), fabsf(x[3])));
    return max(largest_of_lanes(__float_as_uint(most)) & kExponentMask, kLargest * kExponentOne);
  }

  // Of one token, 32 lanes hold four columns each. Returns the unit of its highest digit's sums as 2^-unit; NaN if a
  // column is not finite.
  static __device__ __forceinline__ float make(SharedAddress digits, SharedAddress token, int unit) {
    int const lane = threadIdx.x % 32, block = lane / 4, t = lane % 4;
    float2 const low = floats_of<T>(load_word(token + block * 32 + t * 4));
    float2 const high = floats_of<T>(load_word(token + block * 32 + 16 + t * 4));
    float const x[4] = {low.x, high.x, low.y, high.y};
    unsigned const exponent = exponent_of(x);
    float const scale = __uint_as_float((2 * 127 + kLargest) * kExponentOne - exponent);
    Word v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // digits from -128 to 127, as bytes
      v[e] = (static_cast<Word>(__float2int_rn(x[e] * scale)) + 0x808080u) ^ 0x808080u;
    }
    Word const low01 = __byte_perm(v[0], v[1], 0x5140), low23 = __byte_perm(v[2], v[3], 0x5140);
    Word const high01 = __byte_perm(v[0], v[1], 0x7362), high23 = __byte_perm(v[2], v[3], 0x7362);
    Word const by_digit[kDigits] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                                    __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
#pragma unroll
    for (int d = 0; d < kDigits; ++d) store_word(digits + d * kStep + t * 32 + block * 4, by_digit[d]);
    if (exponent == kExponentMask) return __uint_as_float(0x7fc00000u);
    return __uint_as_float(exponent - (kLargest - 24 + unit) * kExponentOne);
  }

  // Volatile: keeps these and the barriers between them in order, while weights may be loaded across them.
  static __device__ __forceinline__ Word load_word(SharedAddress at) {
    Word word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at));
    return word;
  }
  static __device__ __forceinline__ void store_word(SharedAddress at, Word word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word));
  }
  static __device__ __forceinline__ void wait_for_warp() { asm volatile("bar.warp.sync 0xffffffff;"); }

  // A lane's part of the second operand: a column's words. A token past the last is the first once more.
  static __device__ __forceinline__ void load(Word (&words)[kWords], SharedAddress digits, int tokens) {
    int const column = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    SharedAddress const from =
        digits + (tokens > 1 ? column / kDigits * kBytes : 0) + column % kDigits * kStep + t * 32;
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                   : "r"(from + i * 4));
    }
  }
};

// See HalfProducts (gemv.cuh).
template <class T, int kBits, int kGroups, bool kOffsets, int kPanels>
struct IntegerProducts {
  static constexpr int kTokens = kIntegerTokens;
  using W = Warp<T, kBits, kGroups, kOffsets, kPanels, 1>;
  using F = IntegerFragment<kBits>;
  using Digits = TokenDigits<T>;
  using Sums = float[kPanels][4];  // rows g and g + 8, digits 2 t and 2 t + 1
  static int token_bytes(int m) { return m * kStep * 2; }
  static int scratch_bytes(int m) { return m * Digits::kBytes; }

  // Sums of 128 integer products are at most 2^22: added to the bits of this float, they become a float.
  static constexpr int kFloatBits = 0x4b400000;
  static constexpr float kFloat = 0x1.8p23f;
  static constexpr int kInstructions = kStep / kGroups / 32;  // per scale group
  static constexpr int kWords = kInstructions * kBits / 2;    // per lane, panel and scale group
  static constexpr Word kOnes = 0x01010101u << F::kUnitExponent;

  Problem const& p;

  __device__ __forceinline__ explicit IntegerProducts(Problem const& p_) : p(p_) {}

  // Half a warp loads a token.
  __device__ __forceinline__ void issue(SharedAddress to, int step) const {
    int const token = W::lane() / 16, column = step * kStep + W::lane() % 16 * 8, left = p.weight.k - column;
    if (token >= p.m) return;
    T const* const row = static_cast<T const*>(p.x) + token * p.stride_x;
    cp_async16(to + W::lane() * 16, left > 0 ? row + column : row, min(max(left, 0), 8) * 2);
  }

  // The sum of a group's digits: what a row subtracts per unit of its zero point, and adds for its offset.
  static __device__ __forceinline__ void add_up(int (&sum)[4], Word const* digits) {
    constexpr Word kAll[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
    for (int i = 0; i < kInstructions; ++i) mma(sum, kAll, digits[2 * i], digits[2 * i + 1]);
  }

  // Distance of the zero points of rows g and g + 8 from what fragments subtract.
  __device__ __forceinline__ int2 shift_of(StageLayout const& layout, std::uint8_t const* parameters, int group) const {
    if (kOffsets) return {-F::kMiddle, -F::kMiddle};
    Word const both =
        *reinterpret_cast<std::uint16_t const*>(parameters + layout.scales + group * kPanelRows + W::lane() / 4 * 2);
    return {static_cast<int>(both & 0xff) - F::kMiddle, static_cast<int>(both >> 8) - F::kMiddle};
  }

  __device__ __forceinline__ void multiply(Sums& sums, StageLayout const& layout, std::uint8_t const* stage,
                                           SharedAddress tokens, SharedAddress scratch) const {
    float factor = Digits::make(scratch, tokens, F::kUnitExponent);
    if (p.m > 1) {
      float const second = Digits::make(scratch + Digits::kBytes, tokens + kStep * 2, F::kUnitExponent);
      if (W::lane() % 4 >= 2) factor = second;
    }
    Digits::wait_for_warp();
    Word digits[Digits::kWords];
    Digits::load(digits, scratch, p.m);
    if (kOffsets || p.weight.zero != nullptr) {
      multiply_groups<true>(sums, layout, stage, digits, factor);
    } else {
      multiply_groups<false>(sums, layout, stage, digits, factor);
    }
  }

  // kShifts: rows have zero points or offsets of their own.
  template <bool kShifts>
  __device__ __forceinline__ void multiply_groups(Sums& sums, StageLayout const& layout, std::uint8_t const* stage,
                                                  Word const* digits, float factor) const {
    std::uint8_t const* const parameters = stage + W::kWeightBytes;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      Word const* const of_group = digits + group * 2 * kInstructions;
      int all[4] = {};
      if constexpr (kShifts) add_up(all, of_group);
      float2 scale[kPanels], offset[kPanels];
      W::load(scale, p.weight, layout, parameters, group);
      if constexpr (kOffsets) W::load(offset, p.weight, layout, parameters + layout.scales, group);
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        int2 shift = {0, 0};
        if constexpr (kShifts) shift = shift_of(layout, parameters + s * layout.parameter_bytes, group);
        int sum[4] = {kFloatBits - shift.x * all[0], kFloatBits - shift.x * all[1], kFloatBits - shift.y * all[0],
                      kFloatBits - shift.y * all[1]};
        multiply_group(sum, stage + s * W::kStepBytes, group, of_group);
        add(sums[s], sum, {scale[s].x * factor, scale[s].y * factor});
        if constexpr (kOffsets) {
          int const of_ones[4] = {kFloatBits + all[0], kFloatBits + all[1], kFloatBits + all[0], kFloatBits + all[1]};
          add(sums[s], of_ones, {offset[s].x * factor, offset[s].y * factor});
        }
      }
    }
  }

  static __device__ __forceinline__ void multiply_group(int (&sum)[4], std::uint8_t const* panel, int group,
                                                        Word const* digits) {
    alignas(16) Word words[kWords];
    load(words, panel, group * kWords);
#pragma unroll
    for (int i = 0; i < kInstructions; ++i) {
      Word a[4];
      F::make(a, words + i * (kBits / 2));
      mma(sum, a, digits[2 * i], digits[2 * i + 1]);
    }
  }

  // A lane's words of a panel from the first one on.
  static __device__ __forceinline__ void load(Word (&to)[kWords], std::uint8_t const* panel, int first) {
    std::uint8_t const* const from = panel + first / 4 * 512 + first % 4 * 4 + W::lane() * 16;
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<uint2 const*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<uint4 const*>(from + i * 128);
      }
    }
  }

  static __device__ __forceinline__ void add(float (&sums)[4], int const (&sum)[4], float2 factor) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sums[e] = fmaf(e < 2 ? factor.x : factor.y, __int_as_float(sum[e]) - kFloat, sums[e]);
    }
  }

  // To shared memory, [token][row], tokens `stride` apart.
  static __device__ __forceinline__ void store(float* target, int stride, Sums const& sums, float factor) {
    int const t = W::lane() % 4;
#pragma unroll
    for (int i = 0; i < 2 * kPanels; ++i) {
      float const* const two = sums[i / 2] + i % 2 * 2;
      float of_token = fmaf(two[0], 0x1p-8f, two[1]) * (t % 2 == 0 ? 0x1p-16f : 1.f);
      of_token += __shfl_xor_sync(~0u, of_token, 1);
      if (t % 2 == 0) target[t / 2 * stride + 8 * i + W::lane() / 4] = of_token * factor;
    }
  }
};

}  // namespace epiloq::ops::weight_only_mm
