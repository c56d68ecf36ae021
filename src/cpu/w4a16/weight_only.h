#pragma once

// Building blocks of the CPU implementation. A panel's parameters lie as in memory: [groups, 16] by parameter_of(row).

#include <vector>

#include "cpu/isa/amx_row_tiles.h"
#include "cpu/isa/vectors.h"
#include "problems/packed_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

inline std::int64_t panel_bytes(Weight const& w) {
  return static_cast<std::int64_t>(w.padded_k) / depth(w.bits) * kLanes * lane_bytes(w.bits);
}

// A panel's parameters as float32, with zeros for one group more, which is that of columns past K, but for those that
// share a step with columns before it.
struct PanelParameters {
  std::vector<float> scale, zero, offset;
  std::vector<std::uint64_t> zero_bytes;  // eight times each zero point

  PanelParameters() = default;
  explicit PanelParameters(Weight const& weight);
  void read(Weight const& weight, int panel);
};

// Where the parameters of columns k, k + step, .. begin.
std::vector<int> groups_of(Weight const& weight, int step);

// Whether tokens of bfloat16 are multiplied as they are, from some on (avx512_bf16.h).
bool by_pairs(Problem const& problem, DType dtype);
// Whether many tokens are multiplied in tiles, of float16 and float32 as sums of so many of bfloat16.
bool by_tiles(Problem const& problem, DType dtype);
// And with weights rounded to bfloat16 with their scales, as on a GPU where tokens are so many: of that type, with
// groups that are short beside what is multiplied at a time, or with offsets, which nothing else in tiles takes.
inline constexpr int kMostUnrounded = 128, kWholePiece = 256;
bool rounds_weights(Problem const& problem, DType dtype);
constexpr int tile_parts(DType dtype) { return dtype == DType::kBFloat16 ? 1 : dtype == DType::kFloat16 ? 2 : 3; }

// A few tokens, kSmallM at most, of a weight of 4 or 8 bits whose groups are whole 32 columns: the integers are used
// as they lie, in registers, and tokens are brought into their order.
inline constexpr int kSmallM = 16;
bool is_for_few(Problem const& problem, DType dtype);
struct SmallMTokens {
  std::vector<Line> x;  // by blocks of tokens: [tile, step, token]
  std::vector<int> groups;
  int block;  // tokens that share what is read of the weight: 1, 2 or 4

  SmallMTokens(Problem const& problem, DType dtype);
};
// sums [m filled up] of a panel's rows.
void multiply_small_m(Problem const& problem, SmallMTokens const& tokens, PanelParameters const& parameters, int panel,
                      Line* sums);

// Two panels, or the last one, by tokens in tiles of 16: sums [count up to whole tiles] of their rows.
inline constexpr int kPanelsInTiles = 2;
struct TiledTokens {
  TokenTiles tiles;
  int parts;
  std::vector<Line> x;  // part after part
  std::vector<int> groups;
  bool rounds;  // weights

  TiledTokens(Problem const& problem, DType dtype, int threads);
};
void multiply_tiles(Problem const& problem, TiledTokens const& tokens, PanelParameters const* parameters, int panel,
                    int first, int count, Line* sums);

// Any number of tokens and any weight: tokens are multiplied by the columns of a panel, dequantised or as integers.
struct LargeMTokens {
  std::vector<float> copy;           // of what is no float32
  std::vector<std::uint32_t> pairs;  // or of bfloat16, by blocks
  std::vector<int> groups;
  float const* x;
  std::int64_t stride;

  LargeMTokens(Problem const& problem, DType dtype, int threads);
};
// Of `count` tokens from `first` on.
void multiply_large_m(Problem const& problem, LargeMTokens const& tokens, PanelParameters const& parameters, int panel,
                      int first, int count, Line* sums);

}  // namespace epiloq::ops::weight_only_mm
