// W4A16 decode on the CPU: the instances of decode.h per instruction set, and tokens permuted for them.

#include "cpu/w4a16/decode.h"

#include <array>

#include "cpu/isa/versions.h"
#include "cpu/w4a16/weight_only.h"
#include "epiloq/batch_invariant.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr std::array kBlocks = {1, 2, 4};

// Columns of a tile, by fours of its words, in the order of its bytes: out[step * block] has a value for each word.
// 4 bits: word 4 t + i has columns 16 i + 2 t + {0, 8, 1, 9}.
void order4(float const* tile, int t, int block, Line* out) {
  constexpr int kOf[] = {0, 8, 1, 9};
  for (int step = 0; step < 4; ++step) {
    for (int i = 0; i < 4; ++i) out[step * block].values[4 * t + i] = tile[16 * i + 2 * t + kOf[step]];
  }
}

// 8 bits: word 4 t + i has columns 8 i + 2 t + {0, 1}.
void order8(float const* tile, int t, int block, Line* out) {
  for (int step = 0; step < 2; ++step) {
    for (int i = 0; i < 4; ++i) out[step * block].values[4 * t + i] = tile[8 * i + 2 * t + step];
  }
}

// A token of a block.
void in_order(int bits, float const* row, int padded_k, int block, Line* out) {
  auto* const order = bits == 4 ? order4 : order8;
  for (int first = 0; first < padded_k; first += depth(bits), out += steps(bits) * block) {
    for (int t = 0; t < 4; ++t) order(row + first, t, block, out);
  }
}

using Multiply = void (*)(KBlock, Line* out);

template <int kLanes>
using Bits8 = Row<8, false, false, kLanes>;
template <int kLanes>
using Bits4 = Row<4, false, false, kLanes>;
template <int kLanes>
using Bits4InHalves = Row<4, true, false, kLanes>;
template <int kLanes>
using Mxfp4 = Row<4, true, true, kLanes>;

template <int kBits, template <int> class Values, int kTokens>
struct Of {
  template <int kLanes>
  using Kernel = SmallM<kBits, Values<kLanes>, kTokens, kLanes>;
  static Multiply here() { return Versions<Kernel, KBlock, Line*>::here(); }
};

// In the order of kBlocks.
template <int kBits, template <int> class Values>
std::array<Multiply, kBlocks.size()> by_tokens() {
  return {Of<kBits, Values, 1>::here(), Of<kBits, Values, 2>::here(), Of<kBits, Values, 4>::here()};
}

Multiply multiply_of(HostProblem const& p, int block) {
  static auto const bits8 = by_tokens<8, Bits8>(), bits4 = by_tokens<4, Bits4>(),
                    halves = by_tokens<4, Bits4InHalves>(), mxfp4 = by_tokens<4, Mxfp4>(),
                    nvfp4 = by_tokens<4, RowOf16>();
  Weight const& w = p.weight;
  auto const& of_integers = w.bits == 8 ? bits8 : w.group % (2 * kGrain) == 0 ? bits4 : halves;
  auto const& row = p.format == WeightFormat::kMxfp4 ? mxfp4 : p.format == WeightFormat::kNvfp4 ? nvfp4 : of_integers;
  return row[std::find(kBlocks.begin(), kBlocks.end(), block) - kBlocks.begin()];
}

bool has_grains(HostProblem const& p) {
  Weight const& w = p.weight;
  return p.is_fp4() || w.group % kGrain == 0 || w.group >= w.k;
}

}  // namespace

bool is_for_few(HostProblem const& p, DType dtype) {
  if (batch_invariant()) return false;
  Weight const& w = p.weight;
  // Tiles repay the work on a panel from so many tokens on (Sapphire Rapids, 2026-11-23), as do pairs (Zen 4,
  // 2026-11-21).
  int const in_tiles = dtype == DType::kBFloat16 ? 2 : 4;
  int const most = by_tiles(p, dtype) ? in_tiles : by_pairs(p, dtype) ? 32 / read_bits(w.bits) : kSmallM;
  return p.m <= most && w.k > 0 && has_grains(p);
}

SmallMTokens::SmallMTokens(HostProblem const& p, DType dtype)
    : groups(groups_of(p.weight, kGrain)),
      block(*std::find_if(kBlocks.begin(), kBlocks.end() - 1, [&](int b) { return b >= p.m; })) {
  Weight const& w = p.weight;
  x.resize(static_cast<std::size_t>((p.m + block - 1) / block * block) * (w.padded_k / kWords));
  std::vector<float> row(w.padded_k);
  for (int m = 0; m < p.m; ++m) {
    read_row(p.x, dtype, m * p.stride_x, w.k, row.data());
    in_order(read_bits(w.bits), row.data(), w.padded_k, block,
             x.data() + static_cast<std::size_t>(m / block * block) * (w.padded_k / kWords) + m % block);
  }
}

void multiply_small_m(HostProblem const& p, SmallMTokens const& tokens, PackedPanel const& panel, Line* sums) {
  Weight const& w = p.weight;
  Multiply const multiply = multiply_of(p, tokens.block);
  for (int m = 0; m < p.m; m += tokens.block) {
    multiply({.q = panel.q,
              .x = tokens.x[static_cast<std::size_t>(m) * (w.padded_k / kWords)].values,
              .tiles = w.padded_k / depth(read_bits(w.bits)),
              .groups = tokens.groups.data(),
              .scale = panel.scale.data(),
              .zero = panel.zero.data(),
              .offset = panel.offset.data()},
             sums + m);
  }
}

}  // namespace epiloq::ops::weight_only_mm
