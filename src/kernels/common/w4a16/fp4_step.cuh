#pragma once

// A K step of FP4 weights times tokens by a warp, with mma.sync: of the GEMV, and of the kernel for experts with few
// tokens. Converting codes takes longer than reading them, so instructions count, those of the integer pipe twice.

#include <cstdint>

#include "kernels/common/w4a16/convert_fp4.cuh"
#include "problems/packed_layout.h"

namespace epiloq::ops::weight_only_mm {

// kPanels panels of 16 rows by kTiles tiles of 8 tokens.
template <class T, int kGroups, int kPanels_, int kTiles_>
struct Fp4Step {
  using Scales = Fp4Scales<T, kGroups>;
  using F = typename Scales::F;
  static constexpr int kPanels = kPanels_, kTiles = kTiles_;
  static constexpr int kPanelBytes = kPanelRows * kPadding / 2, kWeightBytes = kPanels * kPanelBytes;  // of a K step
  static constexpr int kScaleBytes = kGroups * kPanelRows;                                             // of a panel
  static constexpr int kSubtiles = 2, kFragments = kPadding / kSubtiles / 16, kBlocks = kFragments / 2;
  static constexpr int kGroupFragments = kPadding / kGroups / 16;
  using Sums = float[kPanels][kTiles][4];

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // A K step of the warp's panels in shared memory, as in a weight.
  struct Step {
    std::uint8_t const *q, *scales;
  };

  // A lane's words, a fragment each, and all tokens' columns of a subtile.
  template <class Tokens>
  static __device__ __forceinline__ void load(uint4 (&words)[kPanels], uint4 (&x)[kTiles][kBlocks], Step const& step,
                                              Tokens const& tokens, int subtile) {
#pragma unroll
    for (int s = 0; s < kPanels; ++s) {
      words[s] = *reinterpret_cast<uint4 const*>(step.q + s * kPanelBytes + subtile * (kPanelBytes / 2) + lane() * 16);
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
    constexpr int kWords = kPanels * kScaleBytes / 4;
    Word any = 0;
#pragma unroll
    for (int i = 0; i < kWords; i += kLanes) {
      if (kWords % kLanes == 0 || i + lane() < kWords) any |= *reinterpret_cast<Word const*>(scales + (i + lane()) * 4);
    }
    return __any_sync(~0u, (any & Scales::kLarge) != 0);
  }

  // sums += W X for a K step. tokens(tile, block) returns load_tokens of a tile's tokens.
  template <class Tokens>
  static __device__ __forceinline__ void multiply(Sums& sums, Step const& step, Tokens tokens) {
    if constexpr (Scales::kMayFold) {
      multiply_folded(sums, step, tokens);
    } else if constexpr (!Scales::kFolds) {
      multiply_scaled(sums, step, tokens);
    } else if (has_large(step.scales)) {
      multiply_scaled(sums, step, tokens);
    } else {
      multiply_folded(sums, step, tokens);
    }
  }

  // With scales folded into the weights.
  template <class Tokens>
  static __device__ __forceinline__ void multiply_folded(Sums& sums, Step const& step, Tokens tokens) {
    std::uint8_t const* const scales = step.scales + lane() / 4 * 2;
#pragma unroll 1
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      uint4 words[kPanels], x[kTiles][kBlocks];
      load(words, x, step, tokens, subtile);
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
  static __device__ __forceinline__ void multiply_scaled(Sums& sums, Step const& step, Tokens tokens) {
    std::uint8_t const* const scales = step.scales + lane() / 4 * 2;
#pragma unroll 1
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      uint4 words[kPanels], x[kTiles][kBlocks];
      load(words, x, step, tokens, subtile);
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
};

}  // namespace epiloq::ops::weight_only_mm
