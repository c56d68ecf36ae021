// Products of a few tokens with 4-bit weights on the CPU: a tile's bytes as they lie, tokens brought into their order.

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/host_rows.h"
#include "ops/weight_only_mm/host.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr int kDepth = 64;                        // columns of a tile
constexpr int kWidth = 16;                        // bytes of a lane of layout.h: of 8 columns, and of the 8 32 further
constexpr int kGrain = 32;                        // columns that a lane's half has in the same group
constexpr int kSteps = kDepth / kWidth;           // lanes of a row
constexpr int kTileBytes = kDepth * (kSlab / 2);  // of 16 rows
constexpr int kParts = kDepth / kGrain;           // groups that a tile may have

// Tokens with a tile's columns in the order of its bytes, K filled up with zeros, and M up to a multiple of `block`;
// and the sum of each half of a tile, where there are offsets.
struct Tokens {
  std::vector<float> x, sums;

  Tokens(Problem const& p, DType dtype, int block)
      : x(static_cast<std::size_t>((p.m + block - 1) / block * block) * p.weight.padded_k) {
    Weight const& w = p.weight;
    std::vector<float> row(w.padded_k);
    float* out = x.data();
    for (int m = 0; m < p.m; ++m) {
      read_row(p.x, dtype, m * p.stride_x, w.k, row.data());
      for (int first = 0; first < w.padded_k; first += kDepth) {
        for (int t = 0; t < kSteps; ++t) {
          for (int i = 0; i < kWidth; ++i) *out++ = row[first + 8 * t + column_of(i)];
        }
      }
      for (int first = 0; w.offset != nullptr && first < w.padded_k; first += kGrain) {
        float sum = 0.f;
        for (int i = 0; i < kGrain; ++i) sum += row[first + i];
        sums.push_back(sum);
      }
    }
  }

  // Byte i of a lane is 8 b + 4 h + 2 e + p, its column 32 b + 4 h + 2 p + e.
  static int column_of(int i) { return (i & 8) * (kGrain / 8) + (i & 4) + 2 * (i & 1) + (i >> 1 & 1); }
};

// A slab's parameters as float32, [groups, 16] in the order of layout.h.
struct Slab {
  std::vector<float> scale, zero, offset;

  void read(Weight const& w, int slab) {
    int const count = w.groups * kSlab;
    std::int64_t const first = static_cast<std::int64_t>(slab) * count;
    scale.resize(count), zero.assign(count, w.offset != nullptr ? 0.f : 8.f);
    read_row(w.scale, w.scale_dtype, first, count, scale.data());
    if (w.zero != nullptr) std::copy_n(w.zero + first, count, zero.begin());
    if (w.offset == nullptr) return;
    offset.resize(count);
    read_row(w.offset, w.scale_dtype, first, count, offset.data());
  }
};

// What the rows g and g + 8 of a slab have for each half of each tile.
struct Pair {
  std::vector<float> scale[2], zero[2], offset[2];

  void read(Weight const& w, Slab const& slab, int g) {
    int const parts = w.padded_k / kGrain;
    for (int r = 0; r < 2; ++r) {
      int const place = parameter_of(g + r * kSlab / 2);
      // Past K scales are 0, so that not even an infinity meets a zero there.
      scale[r].assign(parts, 0.f), zero[r].assign(parts, 0.f), offset[r].assign(parts, 0.f);
      for (int i = 0, end = 0, at = place - kSlab; i * kGrain < w.k; ++i) {
        if (i * kGrain == end) end += w.group, at += kSlab;
        scale[r][i] = slab.scale[at], zero[r][i] = slab.zero[at];
        if (w.offset != nullptr) offset[r][i] = slab.offset[at];
      }
    }
  }
};

using Bytes [[gnu::vector_size(kWidth)]] = std::uint8_t;
using Ints [[gnu::vector_size(4 * kWidth)]] = int;
using Floats [[gnu::vector_size(4 * kWidth)]] = float;

template <class V, class T>
[[gnu::always_inline]] inline void load(V& out, T const* from) {
  std::memcpy(&out, from, sizeof(out));
}

[[gnu::always_inline]] inline void halves(Floats& out, float const* of) {
  float const a = of[0], b = of[1];
  out = Floats{a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
}

[[gnu::always_inline]] inline void widen(Floats& out, Bytes bytes) {
  out = __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
}

// sum_k scale (q - zero) x of two rows and M tokens, in lanes that do not meet until the end.
template <int M>
[[gnu::always_inline]] inline void multiply(std::uint8_t const* q, float const* x, int padded_k, Pair const& pair,
                                            float* sums) {
  Floats low_total[M] = {}, high_total[M] = {};
  for (int tile = 0; tile < padded_k / kDepth; ++tile, q += kTileBytes, x += kDepth) {
    Floats low_part[M] = {}, high_part[M] = {}, low_zero, high_zero, low_scale, high_scale;
    halves(low_zero, &pair.zero[0][kParts * tile]);
    halves(high_zero, &pair.zero[1][kParts * tile]);
    for (int t = 0; t < kSteps; ++t) {
      Bytes bytes;
      Floats low, high, token;
      load(bytes, q + kWidth * t);
      widen(low, bytes & 15);
      widen(high, bytes >> 4);
      low -= low_zero, high -= high_zero;
      for (int m = 0; m < M; ++m) {
        load(token, x + static_cast<std::size_t>(m) * padded_k + kWidth * t);
        low_part[m] += low * token, high_part[m] += high * token;
      }
    }
    halves(low_scale, &pair.scale[0][kParts * tile]);
    halves(high_scale, &pair.scale[1][kParts * tile]);
    for (int m = 0; m < M; ++m) low_total[m] += low_scale * low_part[m], high_total[m] += high_scale * high_part[m];
  }
  for (int m = 0; m < M; ++m) {
    sums[m] = sums[M + m] = 0.f;
    for (int i = 0; i < kWidth; ++i) sums[m] += low_total[m][i], sums[M + m] += high_total[m][i];
  }
}

EPILOQ_CLONES void multiply1(std::uint8_t const* q, float const* x, int padded_k, Pair const& pair, float* sums) {
  multiply<1>(q, x, padded_k, pair, sums);
}
EPILOQ_CLONES void multiply2(std::uint8_t const* q, float const* x, int padded_k, Pair const& pair, float* sums) {
  multiply<2>(q, x, padded_k, pair, sums);
}
EPILOQ_CLONES void multiply4(std::uint8_t const* q, float const* x, int padded_k, Pair const& pair, float* sums) {
  multiply<4>(q, x, padded_k, pair, sums);
}

// Tokens that share what is read of the weight.
constexpr int kBlock = 4;

}  // namespace

bool multiplies4(Weight const& w) { return w.bits == 4 && w.k > 0 && (w.group % kGrain == 0 || w.group >= w.k); }

void multiply4_on_host(Problem const& p, DType dtype) {
  Weight const& w = p.weight;
  int const block = p.m < 3 ? p.m : kBlock, parts = w.padded_k / kGrain;
  auto* const multiply = block == 1 ? multiply1 : block == 2 ? multiply2 : multiply4;
  Tokens const tokens(p, dtype, block);
  std::vector<float> slab(static_cast<std::size_t>(p.m) * kSlab), bias(kSlab);
  Slab parameters;
  Pair pair;
  for (int first = 0; first < w.n; first += kSlab) {
    int const rows = std::min(kSlab, w.n - first);
    std::uint8_t const* const q = w.q + static_cast<std::int64_t>(first / kSlab) * (w.padded_k / kDepth) * kTileBytes;
    parameters.read(w, first / kSlab);
    if (p.bias != nullptr) read_row(p.bias, dtype, first, rows, bias.data());
    for (int g = 0; g < std::min(rows, kSlab / 2); ++g) {
      pair.read(w, parameters, g);
      for (int m0 = 0; m0 < p.m; m0 += block) {
        float sums[2 * kBlock];
        multiply(q + kDepth * g, &tokens.x[static_cast<std::size_t>(m0) * w.padded_k], w.padded_k, pair, sums);
        for (int m = m0; m < std::min(m0 + block, p.m); ++m) {
          for (int r = 0; r < 2; ++r) {
            int const row = g + r * kSlab / 2;
            float value = sums[r * block + m - m0] + bias[row];
            for (int i = 0; w.offset != nullptr && i < parts; ++i)
              value += pair.offset[r][i] * tokens.sums[m * parts + i];
            slab[m * kSlab + row] = value < p.lo ? p.lo : value > p.hi ? p.hi : value;
          }
        }
      }
    }
    for (int m = 0; m < p.m; ++m) write_row(&slab[m * kSlab], rows, dtype, p.out, m * p.stride_out + first);
  }
}

}  // namespace epiloq::ops::weight_only_mm
