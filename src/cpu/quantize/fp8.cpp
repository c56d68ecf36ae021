// quantize_fp8 on the CPU: the kernels' definition, row by row, in code that compilers vectorise.

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/common/rows.h"
#include "problems/quantizers/quantize_fp8.h"

namespace epiloq::ops::quantize_fp8 {
namespace {

// Magnitudes order as their bits do, with NaN above infinity.
EPILOQ_CLONES std::uint32_t largest_bits(float const* x, int count) {
  std::uint32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu);
  return largest;
}

EPILOQ_CLONES void quantize_e4m3(float const* x, int count, float scale, std::uint8_t* q) {
  for (int i = 0; i < count; ++i) q[i] = encode<E4M3>(x[i] / scale);
}

EPILOQ_CLONES void quantize_e5m2(float const* x, int count, float scale, std::uint8_t* q) {
  for (int i = 0; i < count; ++i) q[i] = encode<E5M2>(x[i] / scale);
}

// A row of tiles: the matrix's rows [first, last).
struct Band {
  Problem const& p;
  DType x;
  int first, last;
  float* scale;  // of its first tile

  template <class Take>
  void for_each_run(std::vector<float>& scratch, Take take) const {
    for (int row = first; row < last; ++row) {
      float const* const values = as_float(p.x, x, row * p.stride_x, p.cols, scratch);
      for (int tile = 0; tile < p.tiles; ++tile) {
        std::int64_t const begin = std::int64_t{tile} * p.tile_cols;
        int const count = static_cast<int>(std::min<std::int64_t>(p.tile_cols, p.cols - begin));
        take(row, tile, begin, values + begin, count);
      }
    }
  }
};

void measure(Band const& band, float largest, std::vector<float>& scratch, std::vector<std::uint32_t>& amax) {
  amax.assign(band.p.tiles, 0);
  band.for_each_run(scratch, [&](int, int tile, std::int64_t, float const* values, int count) {
    amax[tile] = std::max(amax[tile], largest_bits(values, count));
  });
  for (int tile = 0; tile < band.p.tiles; ++tile) {
    band.scale[tile * band.p.scale_col] = scale_of(std::bit_cast<float>(amax[tile]), largest, band.p.rule);
  }
}

}  // namespace

void run_on_host(Problem const& p, DType x, DType q) {
  bool const e4m3 = q == DType::kFloat8E4M3;
  std::vector<float> scratch;
  std::vector<std::uint32_t> amax;
  for (std::int64_t first = 0; first < p.rows; first += p.tile_rows) {
    int const last = static_cast<int>(std::min<std::int64_t>(first + p.tile_rows, p.rows));
    Band const band{p, x, static_cast<int>(first), last, p.scale + first / p.tile_rows * p.scale_row};
    if (!p.is_static) measure(band, e4m3 ? E4M3::kMax : E5M2::kMax, scratch, amax);
    band.for_each_run(scratch, [&](int row, int tile, std::int64_t begin, float const* values, int count) {
      float const scale = band.scale[tile * p.scale_col];
      std::uint8_t* const target = p.q + row * p.stride_q + begin;
      if (e4m3) {
        quantize_e4m3(values, count, scale, target);
      } else {
        quantize_e5m2(values, count, scale, target);
      }
    });
    for (int row = band.first; row < last && p.padded_cols > p.cols; ++row) {
      std::memset(p.q + row * p.stride_q + p.cols, 0, p.padded_cols - p.cols);
    }
  }
}

}  // namespace epiloq::ops::quantize_fp8
