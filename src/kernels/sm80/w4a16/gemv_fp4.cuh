#pragma once

// Products policy of the GEMV kernel for FP4 weights: up to 16 tokens of 16 bits. See HalfProducts in gemv.cuh.

#include <utility>

#include "kernels/sm80/w4a16/gemv.cuh"
#include "kernels/sm80/w4a16/warp_tile_fp4.cuh"

namespace epiloq::ops::weight_only_mm {

template <class T, int kGroups, int kPanels, int kTiles>
struct Fp4Products {
  static constexpr int kTokens = 8 * kTiles;
  using W = Fp4Warp<T, kGroups, kPanels, kTiles>;
  using Sums = typename W::Sums;
  static int token_bytes(int m) { return m * TokenLayout::kBytes; }
  static int scratch_bytes(int) { return 0; }

  // Eight lanes load one 128-byte line, half of a token's columns, then the other half; then those of every fourth
  // token after it. Whole lines, as every SM reads the same ones from L2.
  static constexpr int kAtOnce = 4, kLineColumns = 64;
  Problem const& p;
  int token, column;
  T const* x;
  SharedAddress to_even, to_odd;  // of every other token loaded
  TokenLayout read_at[kTiles];    // tokens past the last are read as the first, and their sums dropped

  __device__ __forceinline__ explicit Fp4Products(Problem const& p_)
      : Fp4Products(p_, std::make_integer_sequence<int, kTiles>{}) {}
  template <int... kTile>
  __device__ __forceinline__ Fp4Products(Problem const& p_, std::integer_sequence<int, kTile...>)
      : p(p_),
        token(in_register(W::lane() / 8)),
        column(W::lane() % 8 * 8),
        x(pointer_in_register(static_cast<T const*>(p_.x) + token * p_.stride_x + column)),
        to_even(in_register(TokenLayout::of(token, W::lane() % 8))),
        to_odd(in_register(TokenLayout::of(token + kAtOnce, W::lane() % 8))),
        read_at{TokenLayout(read_token(p_.m, kTile), W::lane() / 8)...} {}
  static __device__ __forceinline__ int read_token(int m, int tile) {
    int const token = tile * 8 + W::lane() % 8;
    return token < m ? token : 0;
  }

  __device__ __forceinline__ void issue(SharedAddress to, int step) const {
    T const* from = x + step * kStep;
    int const left = p.weight.k - step * kStep - column;
#pragma unroll
    for (int i = 0; i < kTokens / kAtOnce; ++i) {
      if (token + i * kAtOnce < p.m) {
        issue_token(to + (i % 2 == 0 ? to_even : to_odd) + i / 2 * TokenLayout::kTile, from, left);
      }
      from += kAtOnce * p.stride_x;
    }
  }

  // The row has `left` columns from there on.
  __device__ __forceinline__ void issue_token(SharedAddress to, T const* from, int left) const {
    if (left >= kLineColumns + 8) {
      cp_async16(to, from);
      cp_async16(to + kLineColumns * 2, from + kLineColumns);
      return;
    }
    void const* const any = p.x;
#pragma unroll
    for (int line = 0; line < kStep; line += kLineColumns) {
      cp_async16(to + line * 2, left > line ? from + line : any, min(max(left - line, 0), 8) * 2);
    }
  }

  __device__ __forceinline__ void multiply(Sums& sums, StageLayout const&, std::uint8_t const* stage,
                                           SharedAddress tokens, SharedAddress) const {
    W::multiply(sums, W::step_of(stage),
                [&](int tile, int block) { return load_tokens(tokens + read_at[tile].at(block)); });
  }

  static __device__ __forceinline__ void store(float* target, int stride, Sums const& sums, float factor) {
    W::store(target, stride, sums, W::F::kUnit * factor);
  }
};

}  // namespace epiloq::ops::weight_only_mm
