// Products of many tokens, or with any weight, on the CPU. 16 lanes are a slab's rows, in the order of its parameters.

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/host_rows.h"
#include "core/host_vectors.h"
#include "core/threads.h"
#include "ops/weight_only_mm/host.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr int kPairs = kSlab / 2;
// Tokens whose sums fit the registers of every instruction set.
constexpr int kBlock = 6;

// Byte `byte` of a lane holds, with both nibbles or together with the byte two further, two rows of this column.
constexpr int column_of(int bits, int lane, int byte) { return place_of(bits, lane, bits == 4 ? 2 * byte : byte).column; }

struct Slab {
  std::uint8_t const* q;
  int k;
  int const* groups;  // of each column
  float const *scale, *zero, *offset;
  float* columns;  // [padded_k, 16]
};

// A column's 16 integers become weights.
[[gnu::always_inline]] inline void restore(Slab const& s, int column, Bytes const& values) {
  Floats scale, zero, offset;
  int const group = s.groups[column];
  load(scale, s.scale + group), load(zero, s.zero + group), load(offset, s.offset + group);
  Floats const out = scale * (__builtin_convertvector(__builtin_convertvector(values, Ints), Floats) - zero) + offset;
  std::memcpy(s.columns + column * kSlab, &out, sizeof(out));
}

// 16 bytes of each of eight pairs of rows, transposed: vector i has the bytes 2 i of all pairs, then the bytes 2 i + 1.
[[gnu::always_inline]] inline void transpose(Bytes* v) {
  for (int stage = 0; stage < 3; ++stage) {
    Bytes out[kPairs];
    for (int i = 0; i < kPairs / 2; ++i) {
      zip_low(out[2 * i], v[i], v[i + kPairs / 2]);
      zip_high(out[2 * i + 1], v[i], v[i + kPairs / 2]);
    }
    for (int i = 0; i < kPairs; ++i) v[i] = out[i];
  }
}

template <int kBits>
[[gnu::always_inline]] inline void restore_tiles(Slab const& s) {
  std::uint8_t const* q = s.q;
  for (int first = 0; first < s.k; first += depth(kBits), q += kLanes * kWidth) {
    for (int lane = 0; lane < 4; ++lane) {
      Bytes v[kPairs];
      for (int g = 0; g < kPairs; ++g) load(v[g], q + (4 * g + lane) * kWidth);
      transpose(v);
#pragma GCC unroll 8
      for (int i = 0; i < kPairs; i += kBits / 4) {
        Bytes const low = kBits == 4 ? v[i] & 15 : v[i], high = kBits == 4 ? v[i] >> 4 : v[i + 1];
        // Bytes of a vector of 8 bits go in twos: first a row's, then the other's.
        int const byte = 2 * i, column = first + column_of(kBits, lane, byte);
        Bytes both;
        zip_low(both, low, high), restore(s, column, both);
        zip_high(both, low, high), restore(s, first + column_of(kBits, lane, byte + 1), both);
      }
    }
  }
}

EPILOQ_CLONES void restore4(Slab const& s) { restore_tiles<4>(s); }
EPILOQ_CLONES void restore8(Slab const& s) { restore_tiles<8>(s); }

template <int kBits>
void restore_by_place(Slab const& s) {
  std::uint8_t const* q = s.q;
  for (int first = 0; first < s.k; first += depth(kBits)) {
    for (int lane = 0; lane < kLanes; ++lane, q += lane_bytes(kBits)) {
      for (int i = 0; i < lane_values(kBits); ++i) {
        Place const place = place_of(kBits, lane, i);
        int const column = first + place.column, row = parameter_of(place.row), at = s.groups[column] + row;
        s.columns[column * kSlab + row] =
            s.scale[at] * (static_cast<float>(value_at(q, kBits, i)) - s.zero[at]) + s.offset[at];
      }
    }
  }
}

// out [tokens, 16] of rows in their own order.
template <int kTokens>
[[gnu::always_inline]] inline void multiply(float const* columns, int k, float const* x, std::int64_t stride,
                                            float* out) {
  Floats sums[kTokens] = {};
  for (int i = 0; i < k; ++i, columns += kSlab) {
    Floats column;
    load(column, columns);
#pragma GCC unroll 8
    for (int m = 0; m < kTokens; ++m) sums[m] += column * x[m * stride + i];
  }
  for (int m = 0; m < kTokens; ++m, out += kSlab) {
    for (int i = 0; i < kSlab; ++i) out[i] = sums[m][parameter_of(i)];
  }
}

using Multiply = void (*)(float const* columns, int k, float const* x, std::int64_t stride, float* out);

#define EPILOQ_MULTIPLY(tokens)                                                                                   \
  EPILOQ_CLONES void multiply##tokens(float const* columns, int k, float const* x, std::int64_t stride, float* out) { \
    multiply<tokens>(columns, k, x, stride, out);                                                                 \
  }
EPILOQ_MULTIPLY(1)
EPILOQ_MULTIPLY(2)
EPILOQ_MULTIPLY(3)
EPILOQ_MULTIPLY(4)
EPILOQ_MULTIPLY(5)
EPILOQ_MULTIPLY(6)
#undef EPILOQ_MULTIPLY

constexpr Multiply kMultiply[kBlock] = {multiply1, multiply2, multiply3, multiply4, multiply5, multiply6};

}  // namespace

ManyTokens::ManyTokens(Problem const& p, DType dtype, int threads)
    : groups(groups_of(p.weight, 1)), x(static_cast<float const*>(p.x)), stride(p.stride_x) {
  if (dtype == DType::kFloat32) return;
  int const k = p.weight.k;
  copy.resize(static_cast<std::size_t>(p.m) * k);
  share(p.m, threads, [&](int first, int last) {
    for (int m = first; m < last; ++m)
      read_row(p.x, dtype, m * p.stride_x, k, copy.data() + static_cast<std::size_t>(m) * k);
  });
  x = copy.data(), stride = k;
}

void multiply_many(Problem const& p, ManyTokens const& tokens, SlabParameters const& parameters, int slab,
                   float* columns, float* out) {
  Weight const& w = p.weight;
  Slab const s{w.q + slab * slab_bytes(w), w.k, tokens.groups.data(), parameters.scale.data(), parameters.zero.data(),
               parameters.offset.data(), columns};
  auto* const restore = w.bits == 4 ? restore4 : w.bits == 8 ? restore8 : w.bits == 3 ? restore_by_place<3>
                                                                                      : restore_by_place<2>;
  restore(s);
  for (int m = 0; m < p.m; m += kBlock) {
    int const count = std::min(kBlock, p.m - m);
    kMultiply[count - 1](columns, w.k, tokens.x + m * tokens.stride, tokens.stride, out + m * kSlab);
  }
}

}  // namespace epiloq::ops::weight_only_mm
