#pragma once

// Prefill kernel (large M): a panel's weights, a block of K at a time, become columns of 16 rows in the order of the
// panel's parameters, each multiplied by one value of six tokens.

#include <algorithm>

#include "cpu/common/columns_by_tokens.h"
#include "cpu/isa/vectors.h"
#include "cpu/w4a16/e2m1.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::weight_only_mm {

// Columns of a K block, which stay in L1.
inline constexpr int kColumns = 256;

// A column's integers.
struct alignas(16) Codes {
  std::uint8_t values[kPanelRows];
};

struct PanelByTokens {
  std::uint8_t const* q;
  int bits, k;  // 4 or 8 bits
  bool is_fp4;
  int const* groups;  // where the parameters of each column begin
  float const *scale, *zero, *offset;
  float const* x;  // [m, stride]
  int m;
  std::int64_t stride;
};

template <int kLanes>
struct LargeM {
  static constexpr int kPairs = kPanelRows / 2;
  using Floats = typename Vectors<kLanes>::Floats;
  using Ints = typename Vectors<kLanes>::Ints;
  using Shorts = typename Vectors<kLanes>::Shorts;
  using Bytes = Vectors<16>::Bytes;

  // Columns' integers or E2M1 numbers become weights.
  template <bool kFp4>
  [[gnu::always_inline]] static void restore(PanelByTokens const& s, int first, int count, Codes const* codes,
                                             Line* out) {
    for (int column = 0; column < count; ++column) {
      int const at = s.groups[first + column];
#pragma GCC unroll 4
      for (int i = 0; i < kPanelRows; i += kLanes) {
        typename Vectors<kLanes>::Bytes q;
        Floats scale, zero, offset;
        load(q, codes[column].values + i);
        load(scale, s.scale + at + i), load(zero, s.zero + at + i), load(offset, s.offset + at + i);
        // (By way of 16 bits: gcc has no vectors' conversion from 8 to 32.)
        auto const wide = __builtin_convertvector(__builtin_convertvector(q, Shorts), Ints);
        Floats weights;
        if constexpr (kFp4) {
          widen_e2m1<kLanes>(weights, wide);
          weights *= scale;
        } else {
          weights = scale * (__builtin_convertvector(wide, Floats) - zero) + offset;
        }
        std::memcpy(out[column].values + i, &weights, sizeof(weights));
      }
    }
  }

  // 16 bytes of each of eight pairs of rows: vector i gets the bytes 2 i of all pairs, then their bytes 2 i + 1.
  [[gnu::always_inline]] static void transpose(Bytes* v) {
    for (int stage = 0; stage < 3; ++stage) {
      Bytes out[kPairs];
      for (int i = 0; i < kPairs / 2; ++i) {
        zip_low(out[2 * i], v[i], v[i + kPairs / 2]);
        zip_high(out[2 * i + 1], v[i], v[i + kPairs / 2]);
      }
      for (int i = 0; i < kPairs; ++i) v[i] = out[i];
    }
  }

  // Columns from `first` to `end`.
  template <int kBits>
  [[gnu::always_inline]] static void unpack(PanelByTokens const& s, int first, int end, Codes* out) {
    constexpr int kTileBytes = weight_only_mm::kLanes * sizeof(Bytes);
    std::uint8_t const* q = s.q + static_cast<std::int64_t>(first / depth(kBits)) * kTileBytes;
    for (; first < end; first += depth(kBits), q += kTileBytes, out += depth(kBits)) {
#pragma GCC unroll 4
      for (int lane = 0; lane < 4; ++lane) {
        Bytes v[kPairs];
        for (int g = 0; g < kPairs; ++g) load(v[g], q + (4 * g + lane) * sizeof(Bytes));
        transpose(v);
        // A byte holds two rows of a column; or of 8 bits one, and the byte two further the other.
#pragma GCC unroll 8
        for (int i = 0; i < kPairs; i += kBits / 4) {
          Bytes const low = kBits == 4 ? v[i] & 15 : v[i], high = kBits == 4 ? v[i] >> 4 : v[i + 1];
          Bytes even, odd;
          zip_low(even, low, high), zip_high(odd, low, high);
          std::memcpy(out + tile_coord_of(kBits, lane, kBits == 4 ? 4 * i : 2 * i).column, &even, sizeof(even));
          std::memcpy(out + tile_coord_of(kBits, lane, kBits == 4 ? 4 * i + 2 : 2 * i + 1).column, &odd, sizeof(odd));
        }
      }
    }
  }

  [[gnu::always_inline]] static void unpack(PanelByTokens const& s, int first, int end, Codes* out) {
    if (s.bits == 4) unpack<4>(s, first, end, out);
    if (s.bits == 8) unpack<8>(s, first, end, out);
  }

  // sums [m]: added to.
  [[gnu::always_inline]] static void run(PanelByTokens const& s, Line* sums) {
    Codes codes[kColumns];
    Line columns[kColumns];
    for (int first = 0; first < s.k; first += kColumns) {
      int const count = std::min(kColumns, s.k - first);
      unpack(s, first, first + count, codes);
      s.is_fp4 ? restore<true>(s, first, count, codes, columns) : restore<false>(s, first, count, codes, columns);
      ColumnsByTokens<kLanes>::add(columns, count, s.x + first, s.stride, s.m, sums);
    }
  }
};

}  // namespace epiloq::ops::weight_only_mm
