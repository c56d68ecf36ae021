// Products of a few tokens on the CPU: the versions of host_few.h, and tokens brought into their order.

#include <array>

#include "core/host_rows.h"
#include "ops/weight_only_mm/host.h"
#include "ops/weight_only_mm/host_few.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr std::array kBlocks = {1, 2, 4};

// The column in a tile of word `word` at a step.
constexpr int column_of(int bits, int step, int word) {
  int const byte = word % 4 * 4 + step;
  return place_of(bits, word / 4, bits == 4 ? 2 * byte : byte).column;
}

// One of a block of tokens.
template <int kBits>
void in_order(float const* row, int padded_k, int block, Line* out) {
  for (int first = 0; first < padded_k; first += depth(kBits)) {
    for (int step = 0; step < steps(kBits); ++step, out += block) {
      for (int word = 0; word < kWords; ++word) out->values[word] = row[first + column_of(kBits, step, word)];
    }
  }
}

using Multiply = void (*)(Piece const&, Line* out);

// By instruction set: lanes and registers.
template <int kBits, bool kHalves, int kTokens>
struct Versions {
  static void plain(Piece const& p, Line* out) { Few<kBits, kHalves, kTokens, 4, 4, Computed>::multiply_slab(p, out); }
#ifdef EPILOQ_HAS_CLONES
  [[gnu::target("arch=x86-64-v3")]] static void v3(Piece const& p, Line* out) {
    Few<kBits, kHalves, kTokens, 8, 4, Computed>::multiply_slab(p, out);
  }
  [[gnu::target("arch=x86-64-v4")]] static void v4(Piece const& p, Line* out) {
    if constexpr (kBits == 4) return Few<kBits, kHalves, kTokens, 16, 8, LookedUp>::multiply_slab(p, out);
    if constexpr (kBits == 8) return Few<kBits, kHalves, kTokens, 16, 8, Computed>::multiply_slab(p, out);
  }
#endif

  static Multiply chosen() {
#ifdef EPILOQ_HAS_CLONES
    if (__builtin_cpu_supports("x86-64-v4")) return v4;
    if (__builtin_cpu_supports("x86-64-v3")) return v3;
#endif
    return plain;
  }
};

// In the order of kBlocks.
template <int kBits, bool kHalves>
std::array<Multiply, kBlocks.size()> by_tokens() {
  return {Versions<kBits, kHalves, 1>::chosen(), Versions<kBits, kHalves, 2>::chosen(),
          Versions<kBits, kHalves, 4>::chosen()};
}

Multiply multiply_of(Weight const& w, int block) {
  static auto const bits8 = by_tokens<8, false>(), bits4 = by_tokens<4, false>(), halves4 = by_tokens<4, true>();
  auto const& row = w.bits == 8 ? bits8 : w.group % (2 * kGrain) == 0 ? bits4 : halves4;
  return row[std::find(kBlocks.begin(), kBlocks.end(), block) - kBlocks.begin()];
}

}  // namespace

bool is_for_few(Problem const& p) {
  Weight const& w = p.weight;
  return (w.bits == 4 || w.bits == 8) && p.m <= kFewTokens && w.k > 0 && (w.group % kGrain == 0 || w.group >= w.k);
}

FewTokens::FewTokens(Problem const& p, DType dtype)
    : groups(groups_of(p.weight, kGrain)),
      block(*std::find_if(kBlocks.begin(), kBlocks.end() - 1, [&](int b) { return b >= p.m; })) {
  Weight const& w = p.weight;
  x.resize(static_cast<std::size_t>((p.m + block - 1) / block * block) * (w.padded_k / kWords));
  std::vector<float> row(w.padded_k);
  auto* const order = w.bits == 4 ? in_order<4> : in_order<8>;
  for (int m = 0; m < p.m; ++m) {
    read_row(p.x, dtype, m * p.stride_x, w.k, row.data());
    order(row.data(), w.padded_k, block,
          x.data() + static_cast<std::size_t>(m / block * block) * (w.padded_k / kWords) + m % block);
  }
}

void multiply_few(Problem const& p, FewTokens const& tokens, SlabParameters const& parameters, int slab, Line* sums) {
  Weight const& w = p.weight;
  Multiply const multiply = multiply_of(w, tokens.block);
  for (int m = 0; m < p.m; m += tokens.block) {
    multiply({.q = w.q + slab * slab_bytes(w),
              .x = tokens.x[static_cast<std::size_t>(m) * (w.padded_k / kWords)].values,
              .tiles = w.padded_k / depth(w.bits),
              .groups = tokens.groups.data(),
              .scale = parameters.scale.data(),
              .zero = parameters.zero.data(),
              .offset = parameters.offset.data()},
             sums + m);
  }
}

}  // namespace epiloq::ops::weight_only_mm
