// Products of a few tokens on the CPU. 64 bytes of two rows g and g + 8 of a tile are 16 words, and an operation on
// words takes the same byte or nibble of each: values of 16 columns of a row.

#include <algorithm>
#include <array>
#include <utility>

#include "core/host_rows.h"
#include "core/host_vectors.h"
#include "ops/weight_only_mm/host.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr int kPairs = kSlab / 2;
constexpr int kRowBytes = 4 * kWidth;  // of two rows in a tile
constexpr int kGrain = 32;             // columns that are surely of one group
constexpr int kBlocks[] = {1, 2, 4, 8};
constexpr int kMost = 8;
// Columns that blocks of tokens go through before the next rows: they and the weights stay in the first cache.
constexpr int kPiece = 512;

// Values of a row that a word has, which is how many steps a tile takes.
constexpr int steps(int bits) { return depth(bits) / kWidth; }

// The column in a tile of word `word` at a step.
constexpr int column_of(int bits, int step, int word) {
  int const byte = word % 4 * 4 + step;
  return place_of(bits, word / 4, bits == 4 ? 2 * byte : byte).column;
}

template <int kBits>
void in_order(float const* row, int padded_k, float* out) {
  for (int first = 0; first < padded_k; first += depth(kBits)) {
    for (int step = 0; step < steps(kBits); ++step) {
      for (int word = 0; word < kWidth; ++word) *out++ = row[first + column_of(kBits, step, word)];
    }
  }
}

// A piece of a slab.
struct Piece {
  std::uint8_t const* q;
  float const* x;  // [tokens, stride]
  std::int64_t stride;
  int tiles;
  int const* groups;  // of each grain
  float const *scale, *zero, *offset;
};

// Word w of a tile of 64 columns is of its second half where bit 1 of w is set: two groups may share a vector.
[[gnu::always_inline]] inline void halves(Floats& out, float a, float b) {
  Floats first, second;
  splat(first, a), splat(second, b);
  out = __builtin_shufflevector(first, second, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31);
}

// A row's values: computed,
template <int kBits, bool kHalves>
struct Computed {
  Floats scale, zero, offset;

  [[gnu::always_inline]] void prepare(Piece const& p, int const* groups, int row) {
    int const a = groups[0] + row, b = groups[kHalves] + row;
    halves(scale, p.scale[a], p.scale[b]), halves(zero, p.zero[a], p.zero[b]);
    halves(offset, p.offset[a], p.offset[b]);
  }
  [[gnu::always_inline]] void values(Floats& out, Ints const& words) const {
    out = scale * (__builtin_convertvector(words & ((1 << kBits) - 1), Floats) - zero) + offset;
  }
};

#ifdef EPILOQ_HAS_CLONES
// or, where an instruction looks up 16 numbers among 16 or 32, found among those that 4 bits can mean.
template <int kBits, bool kHalves>
struct LookedUp {
  Floats values_of[1 + kHalves];

  [[gnu::always_inline]] void prepare(Piece const& p, int const* groups, int row) {
    constexpr Floats kCount = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int half = 0; half <= kHalves; ++half) {
      int const at = groups[half] + row;
      values_of[half] = p.scale[at] * (kCount - p.zero[at]) + p.offset[at];
    }
  }
  [[gnu::always_inline]] void values(Floats& out, Ints const& words) const {
    if constexpr (kHalves) {
      constexpr Ints kHalf = {0, 0, 16, 16, 0, 0, 16, 16, 0, 0, 16, 16, 0, 0, 16, 16};
      out = __builtin_shuffle(values_of[0], values_of[1], (words & 15) | kHalf);
    } else {
      out = __builtin_shuffle(values_of[0], words);
    }
  }
};
#endif

// sums [tokens, 16 rows] of 16 lanes, which do not meet until the end.
template <int kBits, bool kHalves, int kTokens, template <int, bool> class Row>
[[gnu::always_inline]] inline void multiply(Piece const& p, Floats* sums) {
  constexpr int kAtOnce = kMost / kTokens, kGrains = depth(kBits) / kGrain, kSteps = steps(kBits);
  for (int first = 0; first < kPairs; first += kAtOnce) {
    Floats low[kAtOnce][kTokens], high[kAtOnce][kTokens];
    for (int g = 0; g < kAtOnce; ++g) {
      for (int m = 0; m < kTokens; ++m)
        low[g][m] = sums[m * kSlab + first + g], high[g][m] = sums[m * kSlab + kPairs + first + g];
    }
    std::uint8_t const* q = p.q + first * kRowBytes;
    float const* x = p.x;
    for (int tile = 0; tile < p.tiles; ++tile, q += kPairs * kRowBytes, x += depth(kBits)) {
#pragma GCC unroll 8
      for (int g = 0; g < kAtOnce; ++g) {
        Ints words;
        Row<kBits, kHalves> low_row, high_row;
        load(words, q + g * kRowBytes);
        low_row.prepare(p, p.groups + tile * kGrains, 2 * (first + g));
        high_row.prepare(p, p.groups + tile * kGrains, 2 * (first + g) + 1);
#pragma GCC unroll 4
        for (int step = 0; step < kSteps; ++step) {
          Floats low_values, high_values, token;
          low_row.values(low_values, words >> (8 * step));
          high_row.values(high_values, words >> (8 * step + (kBits == 4 ? 4 : 16)));
#pragma GCC unroll 8
          for (int m = 0; m < kTokens; ++m) {
            load(token, x + m * p.stride + kWidth * step);
            low[g][m] += low_values * token, high[g][m] += high_values * token;
          }
        }
      }
    }
    for (int g = 0; g < kAtOnce; ++g) {
      for (int m = 0; m < kTokens; ++m)
        sums[m * kSlab + first + g] = low[g][m], sums[m * kSlab + kPairs + first + g] = high[g][m];
    }
  }
}

// The sum of vector i in lane i.
[[gnu::always_inline]] inline void reduce(Floats* v, float* out) {
  for (int n = kWidth / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) {
      Floats low, high;
      zip_low(low, v[i], v[i + n]), zip_high(high, v[i], v[i + n]);
      v[i] = low + high;
    }
  }
  std::memcpy(out, v, sizeof(*v));
}

template <int kBits, bool kHalves, int kTokens, template <int, bool> class Row>
[[gnu::always_inline]] inline void multiply_slab(Piece p, float* out) {
  constexpr int kTiles = kPiece / depth(kBits);
  Floats sums[kTokens * kSlab] = {};
  for (int left = p.tiles; left > 0; left -= kTiles) {
    p.tiles = std::min(left, kTiles);
    multiply<kBits, kHalves, kTokens, Row>(p, sums);
    p.q += kTiles * kPairs * kRowBytes, p.x += kPiece, p.groups += kPiece / kGrain;
  }
  for (int m = 0; m < kTokens; ++m) reduce(sums + m * kSlab, out + m * kSlab);
}

using Multiply = void (*)(Piece const&, float* out);

template <int kBits, bool kHalves, int kTokens>
Multiply chosen() {
  struct Versions {
    static void plain(Piece const& p, float* out) { multiply_slab<kBits, kHalves, kTokens, Computed>(p, out); }
#ifdef EPILOQ_HAS_CLONES
    [[gnu::target("arch=x86-64-v3")]] static void v3(Piece const& p, float* out) {
      multiply_slab<kBits, kHalves, kTokens, Computed>(p, out);
    }
    [[gnu::target("arch=x86-64-v4")]] static void v4(Piece const& p, float* out) {
      if constexpr (kBits == 4) return multiply_slab<kBits, kHalves, kTokens, LookedUp>(p, out);
      multiply_slab<kBits, kHalves, kTokens, Computed>(p, out);
    }
#endif
  };
#ifdef EPILOQ_HAS_CLONES
  if (__builtin_cpu_supports("x86-64-v4")) return Versions::v4;
  if (__builtin_cpu_supports("x86-64-v3")) return Versions::v3;
#endif
  return Versions::plain;
}

// By the number of tokens, as in kBlocks.
template <int kBits, bool kHalves>
std::array<Multiply, 4> by_tokens() {
  return {chosen<kBits, kHalves, 1>(), chosen<kBits, kHalves, 2>(), chosen<kBits, kHalves, 4>(),
          chosen<kBits, kHalves, 8>()};
}

Multiply multiply_of(Weight const& w, int block) {
  static auto const bits8 = by_tokens<8, false>(), bits4 = by_tokens<4, false>(), halves4 = by_tokens<4, true>();
  auto const& row = w.bits == 8 ? bits8 : w.group % (2 * kGrain) == 0 ? bits4 : halves4;
  return row[std::find(std::begin(kBlocks), std::end(kBlocks), block) - std::begin(kBlocks)];
}

}  // namespace

bool is_for_few(Problem const& p) {
  Weight const& w = p.weight;
  return (w.bits == 4 || w.bits == 8) && p.m <= kFewTokens && w.k > 0 && (w.group % kGrain == 0 || w.group >= w.k);
}

FewTokens::FewTokens(Problem const& p, DType dtype)
    : groups(groups_of(p.weight, kGrain)),
      block(*std::find_if(std::begin(kBlocks), std::end(kBlocks) - 1, [&](int b) { return b >= p.m; })) {
  Weight const& w = p.weight;
  x.resize(static_cast<std::size_t>((p.m + block - 1) / block * block) * w.padded_k);
  std::vector<float> row(w.padded_k);
  auto* const order = w.bits == 4 ? in_order<4> : in_order<8>;
  for (int m = 0; m < p.m; ++m) {
    read_row(p.x, dtype, m * p.stride_x, w.k, row.data());
    order(row.data(), w.padded_k, x.data() + static_cast<std::size_t>(m) * w.padded_k);
  }
}

void multiply_few(Problem const& p, FewTokens const& tokens, SlabParameters const& parameters, int slab, float* out) {
  Weight const& w = p.weight;
  Multiply const multiply = multiply_of(w, tokens.block);
  for (int m = 0; m < p.m; m += tokens.block) {
    multiply({.q = w.q + slab * slab_bytes(w),
              .x = tokens.x.data() + static_cast<std::size_t>(m) * w.padded_k,
              .stride = w.padded_k,
              .tiles = w.padded_k / depth(w.bits),
              .groups = tokens.groups.data(),
              .scale = parameters.scale.data(),
              .zero = parameters.zero.data(),
              .offset = parameters.offset.data()},
             out + m * kSlab);
  }
}

}  // namespace epiloq::ops::weight_only_mm
