#pragma once

// Decode kernel (small M): one weight panel by a few tokens. The 64 bytes of rows g and g + 8 in a packed tile are 16
// words; a word-wise operation extracts the same byte or nibble of each, which are values of 16 columns of a row.

#include <algorithm>
#include <type_traits>

#include "cpu/common/rows.h"
#include "cpu/isa/vectors.h"
#include "cpu/w4a16/e2m1.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr int kPairs = kPanelRows / 2;
inline constexpr int kWords = 16;
inline constexpr int kRowBytes = 4 * kWords;  // of two rows in a tile
inline constexpr int kGrain = 32;             // columns that are surely of one group
// Columns that tokens go through before the next rows: they and the weights stay in L1.
inline constexpr int kKBlock = 512;

// Values of a row that a word has, which is how many steps a tile takes.
constexpr int steps(int bits) { return depth(bits) / kWords; }

struct KBlock {
  std::uint8_t const* q;
  float const* x;  // [tile, step, token, word]
  int tiles;
  int const* groups;  // where the parameters of each grain begin
  float const *scale, *zero, *offset;
};

// Word w of a tile of 64 columns is of its second half where bit 1 of w is set: two groups may share a vector.
inline constexpr std::int32_t kSecondHalf[kWords] = {0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1};

// The values of a row's integers, or of E2M1 numbers: computed,
template <int kBits, bool kHalves, bool kFp4, int kLanes>
struct Computed {
  static constexpr bool kInFours = false;
  using Ints = typename Vectors<kLanes>::Ints;
  using Floats = typename Vectors<kLanes>::Floats;
  // (A scalar spreads in one instruction where it meets a vector; gcc builds a vector of it lane by lane.)
  std::conditional_t<kHalves, Floats, float> scale, zero, offset;

  template <class T>
  [[gnu::always_inline]] static void spread(T& out, float const* parameter, int const* groups, int row) {
    if constexpr (kHalves) {
      Ints second;
      load(second, kSecondHalf);
      out = second ? parameter[groups[1] + row] - Floats{} : parameter[groups[0] + row] - Floats{};
    } else {
      out = parameter[groups[0] + row];
    }
  }
  [[gnu::always_inline]] void prepare(KBlock const& p, int tile, int row) {
    int const* const groups = p.groups + tile * (depth(kBits) / kGrain);
    spread(scale, p.scale, groups, row), spread(zero, p.zero, groups, row), spread(offset, p.offset, groups, row);
  }
  [[gnu::always_inline]] void values(Floats& out, Ints const& words) const {
    if constexpr (kFp4) {
      widen_e2m1<kLanes>(out, words);
      out *= scale;
    } else {
      out = scale * (__builtin_convertvector(words & ((1 << kBits) - 1), Floats) - zero) + offset;
    }
  }
};

#ifdef EPILOQ_HAS_CLONES
// or, with an instruction that looks up 16 numbers in a table of 16 or 32, looked up among the 16 values of 4 bits.
template <int kBits, bool kHalves, bool kFp4, int kLanes>
struct LookedUp {
  static constexpr bool kInFours = false;
  using Ints = typename Vectors<kLanes>::Ints;
  using Floats = typename Vectors<kLanes>::Floats;
  Floats meant[1 + kHalves];

  [[gnu::always_inline]] void prepare(KBlock const& p, int tile, int row) {
    int const* const groups = p.groups + tile * (depth(kBits) / kGrain);
    constexpr Floats kCount = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int half = 0; half <= kHalves; ++half) {
      int const at = groups[half] + row;
      if constexpr (kFp4) {
        load(meant[half], kE2m1);
        meant[half] *= p.scale[at];
      } else {
        meant[half] = p.scale[at] * (kCount - p.zero[at]) + p.offset[at];
      }
    }
  }
  [[gnu::always_inline]] void values(Floats& out, Ints const& words) const {
    if constexpr (kHalves) {
      Ints second;
      load(second, kSecondHalf);
      out = __builtin_shuffle(meant[0], meant[1], (words & 15) | (second & 16));
    } else {
      out = __builtin_shuffle(meant[0], words);
    }
  }
};

template <int kBits, bool kHalves, bool kFp4, int kLanes>
using Row = std::conditional_t<kBits == 4 && kLanes == 16, LookedUp<kBits, kHalves, kFp4, kLanes>,
                               Computed<kBits, kHalves, kFp4, kLanes>>;
#else
template <int kBits, bool kHalves, bool kFp4, int kLanes>
using Row = Computed<kBits, kHalves, kFp4, kLanes>;
#endif

// E2M1 numbers in groups of 16 columns, whose scales are in fours: four groups share a vector, one for each remainder
// of a word's number by 4.
template <int kLanes>
struct RowOf16 {
  static constexpr bool kInFours = true;
  using Floats = typename Vectors<kLanes>::Floats;
  Floats scale;

  [[gnu::always_inline]] void prepare(KBlock const& p, int tile, int row) {
    Vectors<4>::Floats four;
    load(four, p.scale + 4 * (tile * kPanelRows + row));
    if constexpr (kLanes == 4) {
      scale = four;
    } else {  // doubled, not spread at once: gcc 12 goes through memory for that
      auto const eight = __builtin_shufflevector(four, four, 0, 1, 2, 3, 4, 5, 6, 7);
      if constexpr (kLanes == 8) scale = eight;
      if constexpr (kLanes == 16)
        scale = __builtin_shufflevector(eight, eight, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
  }
  [[gnu::always_inline]] void values(Floats& out, typename Vectors<kLanes>::Ints const& words) const {
    widen_e2m1<kLanes>(out, words);
    out *= scale;
  }
};

template <int kBits, class Values, int kTokens, int kLanes>
struct SmallM {
  static constexpr int kSums = kLanes == 16 ? 8 : 4;  // of a pair of rows by a token, which registers hold
  static constexpr int kAtOnce = kSums / kTokens;
  static constexpr int kSteps = steps(kBits);
  using Ints = typename Vectors<kLanes>::Ints;
  using Floats = typename Vectors<kLanes>::Floats;

  // kAtOnce pairs of rows by kTokens tokens; sums [tokens, 16 rows] of lanes, which do not meet until the end.
  [[gnu::always_inline]] static void multiply(KBlock const& p, int first, Floats* sums) {
    Floats low[kAtOnce][kTokens], high[kAtOnce][kTokens];
    for (int g = 0; g < kAtOnce; ++g) {
      for (int m = 0; m < kTokens; ++m)
        low[g][m] = sums[m * kPanelRows + first + g], high[g][m] = sums[m * kPanelRows + kPairs + first + g];
    }
    std::uint8_t const* q = p.q + first * kRowBytes;
    float const* x = p.x;
    for (int tile = 0; tile < p.tiles; ++tile, q += kPairs * kRowBytes, x += depth(kBits) * kTokens) {
#pragma GCC unroll 8
      for (int g = 0; g < kAtOnce; ++g) {
        Values low_row, high_row;
        low_row.prepare(p, tile, parameter_of(first + g));
        high_row.prepare(p, tile, parameter_of(first + g + kPairs));
#pragma GCC unroll 4
        for (int word = 0; word < kWords; word += kLanes) {
          Ints words;
          load(words, q + g * kRowBytes + 4 * word);
#pragma GCC unroll 4
          for (int step = 0; step < kSteps; ++step) {
            Floats low_values, high_values, token;
            low_row.values(low_values, words >> (8 * step));
            high_row.values(high_values, words >> (8 * step + (kBits == 4 ? 4 : 16)));
#pragma GCC unroll 4
            for (int m = 0; m < kTokens; ++m) {
              load(token, x + (kTokens * step + m) * kWords + word);
              low[g][m] += low_values * token, high[g][m] += high_values * token;
            }
          }
        }
      }
    }
    for (int g = 0; g < kAtOnce; ++g) {
      for (int m = 0; m < kTokens; ++m)
        sums[m * kPanelRows + first + g] = low[g][m], sums[m * kPanelRows + kPairs + first + g] = high[g][m];
    }
  }

  // The sum of each of 16 vectors.
  [[gnu::always_inline]] static void reduce(Floats* v, Line& out) {
    if constexpr (kLanes == kPanelRows) {
      sums_of_lanes(v);
      std::memcpy(&out, v, sizeof(*v));
    } else {
      for (int i = 0; i < kPanelRows; ++i) {
        out.values[i] = 0.f;
        for (int l = 0; l < kLanes; ++l) out.values[i] += v[i][l];
      }
    }
  }

  // out [tokens]
  [[gnu::always_inline]] static void run(KBlock p, Line* out) {
    constexpr int kTiles = kKBlock / depth(kBits);
    Floats sums[kTokens * kPanelRows] = {};
    for (int left = p.tiles; left > 0; left -= kTiles) {
      p.tiles = std::min(left, kTiles);
      for (int first = 0; first < kPairs; first += kAtOnce) multiply(p, first, sums);
      p.q += kTiles * kPairs * kRowBytes, p.x += kKBlock * kTokens, p.groups += kKBlock / kGrain;
      if constexpr (Values::kInFours) p.scale += kTiles * 4 * kPanelRows;
    }
    for (int m = 0; m < kTokens; ++m) reduce(sums + m * kPanelRows, out[m]);
  }
};

}  // namespace epiloq::ops::weight_only_mm
