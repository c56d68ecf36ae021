#pragma once

// Warp tile of the mma.sync weight-only kernels: loads K steps of its weight rows, and multiplies them by tokens.

#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/common/ptx/ldmatrix.cuh"
#include "kernels/common/w4a16/convert.cuh"
#include "kernels/common/w4a16/convert_narrow.cuh"
#include "kernels/common/w4a16/stage_layout.h"
#include "problems/packed_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr int kStep = kPadding;  // columns per K step

// Tokens of a K step in shared memory: 256 bytes each, in 16-byte chunks permuted by the token, so that the same
// columns of eight tokens lie in different banks. `chunk` counts from a token's first column.
struct TokenLayout {
  static constexpr int kBytes = kStep * 2;
  static constexpr int kTile = 8 * kBytes;

  int even_at, odd_at;  // of blocks of 32 columns

  static __device__ __forceinline__ int of(int token, int chunk) { return token * kBytes + (chunk ^ token % 8) * 16; }
  __device__ __forceinline__ TokenLayout(int token, int chunk)
      : even_at(in_register(of(token, chunk))), odd_at(in_register(of(token, chunk) ^ 64)) {}
  // The 16 bytes that a lane passes to ldmatrix: token lane % 8, four matrices of 8 columns.
  __device__ __forceinline__ TokenLayout() : TokenLayout(threadIdx.x % 8, threadIdx.x % 32 / 8) {}
  __device__ __forceinline__ int at(int block) const { return (block % 2 ? odd_at : even_at) + block / 2 * 128; }
};

// 32 columns of 8 tokens: two fragments of the second operand.
__device__ __forceinline__ uint4 load_tokens(SharedAddress at) {
  unsigned r[4];
  gemm::ldmatrix_x4(r, at);
  return {r[0], r[1], r[2], r[3]};
}

// kPanels panels of 16 weight rows by kTiles tiles of 8 tokens; kGroups scale groups begin in a K step (of 32 or 64
// columns; of 16 with 2 and 3 bits), or one that spans 2^n steps.
template <class T, int kBits, int kGroups, bool kOffsets, int kPanels, int kTiles, class F_ = Fragment<T, kBits>,
          int kMostColumns = kStep>
struct Warp {
  using F = F_;
  static constexpr bool kNarrow = kBits < 4;
  static constexpr int kStepBytes = kPanelRows * kStep * kBits / 8;  // of a panel
  static constexpr int kVectors = (kStepBytes + 511) / 512;  // of 16 bytes, per lane, panel and step; half with 3 bits
  static constexpr int kWeightBytes = kPanels * kStepBytes;
  // Columns multiplied at a time, within one scale group: as many as the registers hold.
  static constexpr bool kWhole =
      kGroups == 1 && kBits <= 4 && (kTiles == 1 ? kPanels < 4 || !kOffsets : kTiles == 8 && !kOffsets && !kNarrow);
  static constexpr bool kFew = kGroups == 4 || (kNarrow && kGroups > 4) || kTiles > 8 ||
                               (kTiles * kPanels == 8 && (kOffsets || kBits == 8 || kTiles == 2));
  static constexpr int kFitting = kWhole ? kStep : kFew ? 32 : 64;
  // Before SM90 ptxas needs more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kColumns = kFitting < kMostColumns ? kFitting : kMostColumns;
#else
  static constexpr int kColumns = kFitting;
#endif
  static constexpr int kSubtiles = kStep / kColumns;  // per step
  static constexpr int kFragments = kColumns / 16;    // per panel and subtile
  static constexpr int kBlocks = kColumns / 32;       // per subtile
  static constexpr int kGroupsAtOnce = kNarrow && kGroups > kSubtiles ? kGroups / kSubtiles : 1;  // per subtile
  static constexpr int kGroupFragments = kFragments / kGroupsAtOnce;
  // Per lane, panel and subtile.
  static constexpr int kWords = kNarrow ? kBlocks * narrow::block_words(kBits) : kColumns * kBits / 64;
  // Where ptxas would hoist the token loads of all tiles and run out of registers.
  static constexpr bool kPaced = kTiles > 8 || (kTiles == 8 && kOffsets);

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // A lane's sources: its 16 bytes of each vector, and 16 bytes of each panel's parameters, if there are that many
  // (groups of 16 columns: twice). Rows past the last panel are read as the last panel's, and their sums dropped.
  // Offsets fit 32 bits (checked in select.cpp).
  struct Source {
    static constexpr int kParameterVectors = kNarrow && kGroups > 4 ? 2 : 1;
    std::uint8_t const* q;
    std::uint8_t const* parameters[kParameterVectors];
    Word q_at[kPanels], parameters_at[kParameterVectors][kPanels];
    SharedAddress lane_at;
    int group_bytes[kParameterVectors];  // between groups
    int group_shift;                     // steps per group, as a power of two
    bool has_parameters[kParameterVectors];

    __device__ __forceinline__ Source(Weight const& w, StageLayout const& layout, int first_panel)
        : q(w.q), lane_at(in_register(lane() * 16)), group_shift(w.group_shift) {
#pragma unroll
      for (int v = 0; v < kParameterVectors; ++v) {
        int const at = lane() * 16 + v * 512;
        has_parameters[v] = at < layout.parameter_bytes;
        bool const first = at < layout.scales, zeros = !first && w.zero != nullptr;
        void const* const others = w.zero != nullptr ? w.zero : w.offset;
        parameters[v] = static_cast<std::uint8_t const*>(first ? w.scale : others) + at - (first ? 0 : layout.scales);
        group_bytes[v] = kPanelRows * (zeros ? 1 : layout.scale_bytes);
      }
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        int const panel = min(first_panel + s, (w.n - 1) / kPanelRows);
        q_at[s] = static_cast<Word>(panel) * (w.padded_k / kStep * kStepBytes) + lane() * 16;
#pragma unroll
        for (int v = 0; v < kParameterVectors; ++v) {
          parameters_at[v][s] = static_cast<Word>(panel) * (w.groups * group_bytes[v]);
        }
      }
    }

    __device__ __forceinline__ void issue(StageLayout const& layout, SharedAddress stage, int step) const {
      Word const q_step = step * kStepBytes;
      Word group_at[kParameterVectors];
#pragma unroll
      for (int v = 0; v < kParameterVectors; ++v) group_at[v] = (step * kGroups >> group_shift) * group_bytes[v];
      SharedAddress const to = stage + lane_at;
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        std::uint8_t const* const from = q + (q_at[s] + q_step);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          bool const is_whole = (v + 1) * 512 <= kStepBytes;
          if (is_whole || lane() * 16 + v * 512 < kStepBytes) cp_async16(to + s * kStepBytes + v * 512, from + v * 512);
        }
      }
#pragma unroll
      for (int v = 0; v < kParameterVectors; ++v) {
        if (has_parameters[v]) {
#pragma unroll
          for (int s = 0; s < kPanels; ++s) {
            cp_async16(to + kWeightBytes + v * 512 + s * layout.parameter_bytes,
                       parameters[v] + (parameters_at[v][s] + group_at[v]));
          }
        }
      }
    }
  };

  // The E8M0 power 2^(code - 127); 255 is NaN.
  static __device__ __forceinline__ float power_of(Word code) {
    constexpr Word kSmallest = 0x00400000, kNan = 0x7fc00000;  // 2^-127 is subnormal
    return __uint_as_float(code == 0 ? kSmallest : code == 255 ? kNan : code << 23);
  }

  // Scales or offsets of a group in all panels, of rows g and g + 8; `values` points at the first panel's.
  static __device__ __forceinline__ void load(float2 (&to)[kPanels], Weight const& w, StageLayout const& layout,
                                              std::uint8_t const* values, int group) {
    values += (group * kPanelRows + lane() / 4 * 2) * layout.scale_bytes;
    if constexpr (F::kScales == ScaleUse::kPowers) {
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        Word const both = *reinterpret_cast<std::uint16_t const*>(values + s * layout.parameter_bytes);
        to[s] = {power_of(both & 0xff), power_of(both >> 8)};
      }
      return;
    }
    if (w.scale_dtype == DType::kFloat32) {
#pragma unroll
      for (int s = 0; s < kPanels; ++s) to[s] = *reinterpret_cast<float2 const*>(values + s * layout.parameter_bytes);
      return;
    }
    Word both[kPanels];
#pragma unroll
    for (int s = 0; s < kPanels; ++s) both[s] = *reinterpret_cast<Word const*>(values + s * layout.parameter_bytes);
    if (w.scale_dtype == DType::kBFloat16) {
#pragma unroll
      for (int s = 0; s < kPanels; ++s)
        to[s] = {__uint_as_float(both[s] << 16), __uint_as_float(both[s] & 0xffff0000u)};
    } else {
#pragma unroll
      for (int s = 0; s < kPanels; ++s) to[s] = __half22float2(*reinterpret_cast<__half2 const*>(&both[s]));
    }
  }

  static __device__ __forceinline__ void load(typename F::Zero (&to)[kPanels], Weight const& w,
                                              StageLayout const& layout, std::uint8_t const* parameters, int group) {
    Word both[kPanels];
    if (!kOffsets && w.zero != nullptr) {
      std::uint8_t const* const zeros = parameters + layout.scales + group * kPanelRows + lane() / 4 * 2;
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        both[s] = *reinterpret_cast<std::uint16_t const*>(zeros + s * layout.parameter_bytes);
      }
    } else {
#pragma unroll
      for (int s = 0; s < kPanels; ++s) both[s] = kOffsets ? 0 : 0x101u << (kBits - 1);
    }
#pragma unroll
    for (int s = 0; s < kPanels; ++s) to[s] = F::zero(both[s] & 0xff, both[s] >> 8);
  }

  // A lane's words of a panel and subtile.
  static __device__ __forceinline__ void load(Word (&to)[kWords], std::uint8_t const* stage, int s, int subtile) {
    if constexpr (kNarrow) {
      constexpr int kTileBlocks = kTileColumns / 32;
#pragma unroll
      for (int b = 0; b < kBlocks; b += kTileBlocks) {
        int const block = subtile * kBlocks + b;
        stage_words(to + b * narrow::block_words(kBits),
                    stage + s * kStepBytes + block / kTileBlocks * kTileBytes + lane() * lane_bytes(kBits),
                    block % kTileBlocks);
      }
    } else if constexpr (kWords == 2) {
      uint2 const two =
          *reinterpret_cast<uint2 const*>(stage + s * kStepBytes + subtile / 2 * 512 + lane() * 16 + subtile % 2 * 8);
      to[0] = two.x;
      to[1] = two.y;
    } else {
      stage += s * kStepBytes + subtile * (kWords / 4) * 512 + lane() * 16;
#pragma unroll
      for (int v = 0; v < kWords / 4; ++v) {
        uint4 const four = *reinterpret_cast<uint4 const*>(stage + v * 512);
        to[4 * v] = four.x;
        to[4 * v + 1] = four.y;
        to[4 * v + 2] = four.z;
        to[4 * v + 3] = four.w;
      }
    }
  }

  // With 2 and 3 bits: the words of one block of a lane's tile, or of both.
  static constexpr int kTileColumns = depth(kBits), kTileBytes = kLanes * lane_bytes(kBits);
  static __device__ __forceinline__ void stage_words(Word* to, std::uint8_t const* lane_at, int block) {
    constexpr int kBlockWords = narrow::block_words(kBits);
    if constexpr (kBits == 2 && kBlocks > 1) {
      uint2 const both = *reinterpret_cast<uint2 const*>(lane_at);
      to[0] = both.x;
      to[1] = both.y;
    } else {
      Word const* const words = reinterpret_cast<Word const*>(lane_at);
      narrow::take_block<kBits>(to, words, block);
      if constexpr (kBlocks > 1) narrow::take_block<kBits>(to + kBlockWords, words, 1);
    }
  }

  static __device__ __forceinline__ void convert(Word (&a)[4], Word const (&words)[kWords], int f,
                                                 typename F::Zero const& zero) {
    if constexpr (kNarrow) {
      F::make(a, words + f / 2 * narrow::block_words(kBits), f % 2, zero);
    } else {
      F::make(a, words + f * (kBits / 4), zero);
    }
  }

  struct Sum {
    float v[4];
  };

  // sum += the fragment f of the subtile's columns, times tokens.
  static __device__ __forceinline__ void multiply_fragment(float (&sum)[4], Word const (&a)[4],
                                                           uint4 const (&x)[kBlocks], int f) {
    uint4 const& b = x[f / 2];
    mma<T>(sum, a, f % 2 ? b.z : b.x, f % 2 ? b.w : b.y, sum);
  }

  // Over a group's fragments, the first of which is fragment `first` of the subtile.
  static __device__ __forceinline__ Sum product(Word const (&a)[kGroupFragments][4], uint4 const (&x)[kBlocks],
                                                int first) {
    Sum sum{};
#pragma unroll
    for (int f = 0; f < kGroupFragments; ++f) multiply_fragment(sum.v, a[f], x, first + f);
    return sum;
  }

  static __device__ __forceinline__ Sum sum_of(uint4 const (&x)[kBlocks], int first) {
    Word ones[kGroupFragments][4];
#pragma unroll
    for (int i = 0; i < kGroupFragments * 4; ++i) ones[i / 4][i % 4] = F::kOnes;
    return product(ones, x, first);
  }

  static __device__ __forceinline__ void add(float (&sums)[4], Sum const& group, float2 factor) {
    sums[0] = fmaf(factor.x, group.v[0], sums[0]);
    sums[1] = fmaf(factor.x, group.v[1], sums[1]);
    sums[2] = fmaf(factor.y, group.v[2], sums[2]);
    sums[3] = fmaf(factor.y, group.v[3], sums[3]);
  }

  // sums += W X for a K step, with scales folded into the weights: a group is one instruction's 16 columns.
  template <class Tokens>
  static __device__ __forceinline__ void multiply_folded(float (&sums)[kPanels][kTiles][4], StageLayout const& layout,
                                                         std::uint8_t const* stage, Tokens tokens) {
    std::uint8_t const* const parameters = stage + kWeightBytes + lane() / 4 * 2;
#pragma unroll 1
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      Word words[kPanels][kWords], a[kPanels][kFragments][4];
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        load(words[s], stage, s, subtile);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          std::uint8_t const* const scales = parameters + (subtile * kFragments + f) * kPanelRows;
          Word const both = *reinterpret_cast<std::uint16_t const*>(scales + s * layout.parameter_bytes);
          F::make(a[s][f], words[s] + f * (kBits / 4), F::factor(both));
        }
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        uint4 x[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) x[b] = tokens(j, subtile * kBlocks + b);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
          for (int s = 0; s < kPanels; ++s) multiply_fragment(sums[s][j], a[s][f], x, f);
        }
      }
    }
  }

  // The same with scales of groups, by which their sums are multiplied.
  template <class Tokens>
  static __device__ __forceinline__ void multiply_groups(float (&sums)[kPanels][kTiles][4], Weight const& w,
                                                         StageLayout const& layout, std::uint8_t const* stage,
                                                         Tokens tokens) {
    std::uint8_t const* const parameters = stage + kWeightBytes;
#pragma unroll 1
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      Word words[kPanels][kWords];
#pragma unroll
      for (int s = 0; s < kPanels; ++s) load(words[s], stage, s, subtile);
#pragma unroll
      for (int group = 0; group < kGroupsAtOnce; ++group) {
        multiply_group(sums, w, layout, parameters, subtile * kGroups / kSubtiles + group, words,
                       group * kGroupFragments, [&](uint4(&x)[kBlocks], int tile) {
#pragma unroll
                         for (int b = 0; b < kBlocks; ++b) x[b] = tokens(tile, subtile * kBlocks + b);
                       });
      }
    }
  }

  // Of one scale group within a subtile, whose first fragment is `first`; fetch(x, tile) loads a tile's tokens.
  template <class Fetch>
  static __device__ __forceinline__ void multiply_group(float (&sums)[kPanels][kTiles][4], Weight const& w,
                                                        StageLayout const& layout, std::uint8_t const* parameters,
                                                        int group, Word const (&words)[kPanels][kWords], int first,
                                                        Fetch fetch) {
    typename F::Zero zero[kPanels];
    load(zero, w, layout, parameters, group);
    float2 scale[kPanels], offset[kPanels];
    load(scale, w, layout, parameters, group);
    if constexpr (kOffsets) load(offset, w, layout, parameters + layout.scales, group);
    auto const add_offsets = [&](uint4 const(&x)[kBlocks], int tile) {
      if constexpr (kOffsets) {
        Sum const sum = sum_of(x, first);
#pragma unroll
        for (int s = 0; s < kPanels; ++s) add(sums[s][tile], sum, offset[s]);
      }
    };
    if constexpr (kTiles <= 2) {  // fragments are used once or twice: convert and multiply one at a time
      uint4 x[kTiles][kBlocks];
      Sum part[kPanels][kTiles]{};
#pragma unroll
      for (int j = 0; j < kTiles; ++j) fetch(x[j], j);
#pragma unroll
      for (int f = first; f < first + kGroupFragments; ++f) {
#pragma unroll
        for (int s = 0; s < kPanels; ++s) {
          Word a[4];
          convert(a, words[s], f, zero[s]);
#pragma unroll
          for (int j = 0; j < kTiles; ++j) multiply_fragment(part[s][j].v, a, x[j], f);
        }
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int s = 0; s < kPanels; ++s) add(sums[s][j], part[s][j], scale[s]);
        if constexpr (kOffsets) add_offsets(x[j], j);
      }
    } else {
      Word a[kPanels][kGroupFragments][4];
#pragma unroll
      for (int i = 0; i < kPanels * kGroupFragments; ++i) {
        int const s = i / kGroupFragments, f = i % kGroupFragments;
        convert(a[s][f], words[s], first + f, zero[s]);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        uint4 x[kBlocks];
        if constexpr (kPaced) __syncwarp();
        fetch(x, j);
        if constexpr (kPaced) __syncwarp();
#pragma unroll
        for (int s = 0; s < kPanels; ++s) add(sums[s][j], product(a[s], x, first), scale[s]);
        if constexpr (kOffsets) add_offsets(x, j);
      }
    }
  }

  // sums += W X for a K step. tokens(tile, block) returns load_tokens of a tile's tokens.
  template <class Tokens>
  static __device__ __forceinline__ void multiply(float (&sums)[kPanels][kTiles][4], Weight const& w,
                                                  StageLayout const& layout, std::uint8_t const* stage, Tokens tokens) {
    if constexpr (F::kScales == ScaleUse::kFolded) {
      multiply_folded(sums, layout, stage, tokens);
    } else {
      multiply_groups(sums, w, layout, stage, tokens);
    }
  }

  // To shared memory, [token][row], tokens `stride` apart; `unit` multiplies all sums.
  static __device__ __forceinline__ void store(float* target, int stride, float const (&sums)[kPanels][kTiles][4],
                                               float unit = F::kUnit) {
#pragma unroll
    for (int s = 0; s < kPanels; ++s) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const token = 8 * j + 2 * (lane() % 4) + i % 2, row = kPanelRows * s + 8 * (i / 2) + lane() / 4;
          target[token * stride + row] = sums[s][j][i] * unit;
        }
      }
    }
  }
};

}  // namespace epiloq::ops::weight_only_mm
