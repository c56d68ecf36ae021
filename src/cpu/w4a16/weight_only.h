#pragma once

// Building blocks of the CPU implementation.

#include <vector>

#include "cpu/isa/amx_row_tiles.h"
#include "cpu/isa/vectors.h"
#include "cpu/w4a16/packed_panel.h"

namespace epiloq::ops::weight_only_mm {

// A product of integers or of E2M1 numbers, whose sums are multiplied by a factor if there is one.
struct HostProblem : Problem {
  WeightFormat format = WeightFormat::kInteger;
  float const* factor = nullptr;

  bool is_fp4() const { return format != WeightFormat::kInteger; }
};

// Offsets of the parameters of columns 0, step, 2 step, ….
std::vector<int> groups_of(Weight const& weight, int step);

// Whether bfloat16 tokens are multiplied in bfloat16 pairs (avx512_bf16.h), for large enough M.
bool by_pairs(HostProblem const& problem, DType dtype);
// Whether many tokens are multiplied in AMX tiles; float16 and float32 are split into a sum of bfloat16 values.
bool by_tiles(HostProblem const& problem, DType dtype);
// Whether, in tiles, weights times scales are rounded to bfloat16, as on a GPU at this M: for bfloat16 tokens and
// groups shorter than kWholePiece columns, or with offsets, which the other kernels in tiles do not support.
inline constexpr int kMostUnrounded = 128, kWholePiece = 256;
bool rounds_weights(HostProblem const& problem, DType dtype);
constexpr int tile_parts(DType dtype) { return dtype == DType::kBFloat16 ? 1 : dtype == DType::kFloat16 ? 2 : 3; }

// At most kSmallM tokens and a weight of 4 or 8 bits whose groups are multiples of 32 columns, or E2M1 numbers: they
// are used in memory order, in registers, and tokens are permuted to that order.
inline constexpr int kSmallM = 16;
bool is_for_few(HostProblem const& problem, DType dtype);
struct SmallMTokens {
  std::vector<Line> x;  // by blocks of tokens: [tile, step, token]
  std::vector<int> groups;
  int block;  // tokens that share what is read of the weight: 1, 2 or 4

  SmallMTokens(HostProblem const& problem, DType dtype);
};
// sums [m padded] of a panel's rows.
void multiply_small_m(HostProblem const& problem, SmallMTokens const& tokens, PackedPanel const& panel, Line* sums);

// Two panels, or the last one, by tokens in tiles of 16: sums [count up to whole tiles] of their rows.
inline constexpr int kPanelsInTiles = 2;
struct TiledTokens {
  TokenTiles tiles;
  int parts;
  std::vector<Line> x;  // part after part
  std::vector<int> groups;
  bool rounds;  // weights

  TiledTokens(HostProblem const& problem, DType dtype, int threads);
};
void multiply_tiles(HostProblem const& problem, TiledTokens const& tokens, PackedPanel const* panels, int how_many,
                    int first, int count, Line* sums);

// Any number of tokens and any weight: tokens are multiplied by the columns of a panel, dequantised or as integers.
struct LargeMTokens {
  std::vector<float> copy;           // of tokens in 16 bits
  std::vector<std::uint32_t> pairs;  // or bfloat16 pairs, by blocks
  std::vector<int> groups;
  float const* x;
  std::int64_t stride;

  LargeMTokens(HostProblem const& problem, DType dtype, int threads);
};
// Multiplies `count` tokens from `first` on.
void multiply_large_m(HostProblem const& problem, LargeMTokens const& tokens, PackedPanel const& panel, int first,
                      int count, Line* sums);

}  // namespace epiloq::ops::weight_only_mm
