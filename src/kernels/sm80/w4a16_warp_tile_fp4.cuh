#pragma once

// Warp tile of the GEMV kernel with FP4 weights: loads K steps of its weight rows, and multiplies them by tokens.
// Converting codes takes longer than reading them, so instructions count, those of the integer pipe twice.

#include "core/ceil_div.h"
#include "kernels/common/w4a16/convert_fp4.cuh"
#include "kernels/sm80/w4a16_warp_tile.cuh"

namespace epiloq::ops::weight_only_mm {

// See in_register.
template <class T>
__device__ __forceinline__ T const* pointer_in_register(T const* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Factors of codes' patterns, from bytes of scales: one multiplication gives both halves of a register.
template <class T, int kGroups>
struct Fp4Scales;

// NVFP4: see Nvfp4Fragment.
template <class T>
struct Fp4Scales<T, 8> {
  using F = Nvfp4Fragment<T>;
  static constexpr bool kFolds = true, kMayFold = true;
  static __device__ __forceinline__ Word factor(Word byte) {
    if constexpr (F::kIsHalf) return byte * twice_of(1 << 7);
    return byte * twice_of(1 << 4) + twice_of(0x7000);  // 224 to the exponent
  }
  static constexpr Word twice_of(Word half) { return half * 0x10001u; }
};

// MXFP4. In bfloat16 a code times a scale of up to 1 is a number, 2^-128 or more, and the factor 2^(byte - 1) of its
// pattern too; bytes from 128 on, among them NaN, multiply sums. So they always do in a half.
template <class T>
struct Fp4Scales<T, 4> {
  using F = Mxfp4Fragment<T>;
  static constexpr bool kFolds = !F::kIsHalf, kMayFold = false;
  static constexpr Word kLarge = 0x80808080;
  static __device__ __forceinline__ Word factor(Word byte) {
    constexpr Word kTwice = 0x10001u, kBias = 126;
    return byte * (kTwice << 7) + (kBias << 7) * kTwice;
  }

  // The power 2^(byte - 127). As a float's exponent 0 would be no power, and 255 infinite, of which zero times itself
  // makes NaN.
  static __device__ __forceinline__ float power(Word byte) {
    constexpr Word kSmallest = 0x00400000;  // 2^-127, subnormal
    float const power = __uint_as_float(max(byte << 23, kSmallest));
    return fmaf(power, 0.f, power);
  }
};

// kPanels panels of 16 rows by kTiles tiles of 8 tokens.
template <class T, int kGroups, int kPanels_, int kTiles_>
struct Fp4Warp {
  using Scales = Fp4Scales<T, kGroups>;
  using F = typename Scales::F;
  static constexpr int kPanels = kPanels_, kTiles = kTiles_;
  static constexpr int kPanelBytes = kPanelRows * kStep / 2, kWeightBytes = kPanels * kPanelBytes;  // of a K step
  static constexpr int kScaleBytes = kGroups * kPanelRows;                                          // of a panel
  static constexpr int kSubtiles = 2, kFragments = kStep / kSubtiles / 16, kBlocks = kFragments / 2;
  static constexpr int kGroupFragments = kStep / kGroups / 16;
  using Sums = float[kPanels][kTiles][4];

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // A lane's sources: its 16 bytes of a panel's two vectors, and 16 bytes of one panel's scales, or of two panels'.
  // Rows past the last panel are read as the last panel's, and their sums dropped. Offsets fit 32 bits (checked in
  // select.cpp).
  struct Source {
    static constexpr int kScaleLanes = kScaleBytes / 16;  // per panel
    static constexpr int kPanelsAtOnce = kLanes / kScaleLanes, kScaleVectors = ceil_div(kPanels, kPanelsAtOnce);
    std::uint8_t const *q, *scales[kScaleVectors];
    Word q_at[kPanels];
    SharedAddress lane_at;

    __device__ __forceinline__ Source(Weight const& w, StageLayout const&, int first_panel)
        : q(pointer_in_register(w.q + lane() * 16)), lane_at(in_register(lane() * 16)) {
      int const last = (w.n - 1) / kPanelRows;
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        q_at[s] = static_cast<Word>(min(first_panel + s, last)) * (w.padded_k / kStep * kPanelBytes);
      }
      auto const* const all = static_cast<std::uint8_t const*>(w.scale);
#pragma unroll
      for (int v = 0; v < kScaleVectors; ++v) {
        Word const panel = min(first_panel + v * kPanelsAtOnce + lane() / kScaleLanes, last);
        scales[v] = pointer_in_register(all + panel * (w.groups * kPanelRows) + lane() % kScaleLanes * 16);
      }
    }

    __device__ __forceinline__ void issue(StageLayout const&, SharedAddress stage, int step) const {
      SharedAddress const to = stage + lane_at;
      std::uint8_t const* const from = q + step * kPanelBytes;
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        cp_async16(to + s * kPanelBytes, from + q_at[s]);
        cp_async16(to + s * kPanelBytes + kPanelBytes / 2, from + q_at[s] + kPanelBytes / 2);
      }
#pragma unroll
      for (int v = 0; v < kScaleVectors; ++v) {
        bool const is_whole = (v + 1) * kPanelsAtOnce <= kPanels;
        if (is_whole || lane() < (kPanels - v * kPanelsAtOnce) * kScaleLanes) {
          cp_async16(to + kWeightBytes + v * kLanes * 16, scales[v] + step * kScaleBytes);
        }
      }
    }
  };

  // A lane's words, a fragment each, and all tokens' columns of a subtile.
  template <class Tokens>
  static __device__ __forceinline__ void load(uint4 (&words)[kPanels], uint4 (&x)[kTiles][kBlocks],
                                              std::uint8_t const* stage, Tokens const& tokens, int subtile) {
#pragma unroll
    for (int s = 0; s < kPanels; ++s) {
      words[s] = *reinterpret_cast<uint4 const*>(stage + s * kPanelBytes + subtile * (kPanelBytes / 2) + lane() * 16);
    }
#pragma unroll
    for (int i = 0; i < kTiles * kBlocks; ++i) {
      x[i / kBlocks][i % kBlocks] = tokens(i / kBlocks, subtile * kBlocks + i % kBlocks);
    }
  }
  static __device__ __forceinline__ Word word_of(uint4 const& words, int f) {
    return f == 0 ? words.x : f == 1 ? words.y : f == 2 ? words.z : words.w;
  }

  // Whether a scale of the K step has to multiply sums.
  static __device__ __forceinline__ bool has_large(std::uint8_t const* scales) {
    static_assert(kPanels * kScaleBytes % (4 * kLanes) == 0);
    Word any = 0;
#pragma unroll
    for (int i = 0; i < kPanels * kScaleBytes / (4 * kLanes); ++i) {
      any |= *reinterpret_cast<Word const*>(scales + (i * kLanes + lane()) * 4);
    }
    return __any_sync(~0u, (any & Scales::kLarge) != 0);
  }

  // sums += W X for a K step. tokens(tile, block) returns load_tokens of a tile's tokens.
  template <class Tokens>
  static __device__ __forceinline__ void multiply(Sums& sums, std::uint8_t const* stage, Tokens tokens) {
    if constexpr (Scales::kMayFold) {
      multiply_folded(sums, stage, tokens);
    } else if constexpr (!Scales::kFolds) {
      multiply_scaled(sums, stage, tokens);
    } else if (has_large(stage + kWeightBytes)) {
      multiply_scaled(sums, stage, tokens);
    } else {
      multiply_folded(sums, stage, tokens);
    }
  }

  // With scales folded into the weights.
  template <class Tokens>
  static __device__ __forceinline__ void multiply_folded(Sums& sums, std::uint8_t const* stage, Tokens tokens) {
    std::uint8_t const* const scales = stage + kWeightBytes + lane() / 4 * 2;
#pragma unroll 1
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      uint4 words[kPanels], x[kTiles][kBlocks];
      load(words, x, stage, tokens, subtile);
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        Word factor[2];
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          if (f % kGroupFragments == 0) {
            int const group = (subtile * kFragments + f) / kGroupFragments;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              factor[row] = Scales::factor(scales[s * kScaleBytes + group * kPanelRows + row]);
            }
          }
          Word a[4];
          E2M1<T>::patterns(a, word_of(words[s], f));
#pragma unroll
          for (int p = 0; p < 4; ++p) a[p] = multiply_pairs(T{}, a[p], factor[p % 2]);
          multiply_fragment(sums[s], a, x, f);
        }
      }
    }
  }

  // With sums of groups multiplied by their scales.
  template <class Tokens>
  static __device__ __forceinline__ void multiply_scaled(Sums& sums, std::uint8_t const* stage, Tokens tokens) {
    std::uint8_t const* const scales = stage + kWeightBytes + lane() / 4 * 2;
#pragma unroll 1
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      uint4 words[kPanels], x[kTiles][kBlocks];
      load(words, x, stage, tokens, subtile);
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
#pragma unroll
        for (int first = 0; first < kFragments; first += kGroupFragments) {
          std::uint8_t const* const of_group =
              scales + s * kScaleBytes + (subtile * kFragments + first) / kGroupFragments * kPanelRows;
          float const power[2] = {Scales::power(of_group[0]), Scales::power(of_group[1])};
          float part[kTiles][4] = {};
#pragma unroll
          for (int f = first; f < first + kGroupFragments; ++f) {
            Word a[4];
            E2M1<T>::patterns(a, word_of(words[s], f));
            if constexpr (!F::kIsHalf) {
#pragma unroll
              for (int p = 0; p < 4; ++p) a[p] = multiply_pairs(T{}, a[p], E2M1<T>::kToValues);
            }
            multiply_fragment(part, a, x, f);
          }
#pragma unroll
          for (int i = 0; i < kTiles * 4; ++i) {
            float& sum = sums[s][i / 4][i % 4];
            sum = fmaf(power[i % 4 / 2], part[i / 4][i % 4], sum);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void multiply_fragment(float (&sums)[kTiles][4], Word const (&a)[4],
                                                           uint4 const (&x)[kTiles][kBlocks], int f) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      uint4 const& b = x[j][f / 2];
      mma<T>(sums[j], a, f % 2 ? b.z : b.x, f % 2 ? b.w : b.y, sums[j]);
    }
  }

  // To shared memory, [token][row], tokens `stride` apart; `unit` multiplies all sums.
  static __device__ __forceinline__ void store(float* target, int stride, Sums const& sums, float unit) {
    Warp<T, 4, kGroups, false, kPanels, kTiles, F>::store(target, stride, sums, unit);
  }
};

}  // namespace epiloq::ops::weight_only_mm
