// quantize_blockwise_int8 on the CPU: the kernels' definition, block by block, in code that compilers vectorise.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/float8.h"
#include "cpu/common/rows.h"
#include "problems/quantizers/quantize_blockwise_int8.h"

namespace epiloq::ops::quantize_blockwise_int8 {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Parameters {
  float scale, offset;
};

Parameters measure(Range range, bool symmetric) {
  float const reach = symmetric ? std::max(-range.lo, range.hi) : range.hi - range.lo;
  if (range.has_nan || !(reach <= kLargest)) return {kNan, symmetric ? 0.f : kNan};
  float const step = std::max(reach / (symmetric ? 127.f : 255.f), kSmallestScale);
  float const scale = reach == 0.f ? 1.f : step;
  if (symmetric) return {scale, 0.f};
  return {scale, reach == 0.f ? range.hi + 0.f : range.hi - 127.f * scale};  // + 0: never -0
}

EPILOQ_CLONES std::int32_t quantize_block(float const* x, int count, float scale, float offset, std::int8_t* q) {
  std::int32_t sum = 0;
  for (int i = 0; i < count; ++i) {
    float rounded = std::nearbyint((x[i] - offset) / scale);
    rounded = rounded == rounded ? rounded : 0.f;
    float const low = rounded < -128.f ? -128.f : rounded;
    int const value = static_cast<int>(low > 127.f ? 127.f : low);
    q[i] = static_cast<std::int8_t>(value);
    sum += value;
  }
  return sum;
}

void quantize_row(Problem const& p, int row, float const* x) {
  std::int8_t* const q = p.q + row * p.stride_q;
  for (int begin = 0, block = 0; begin < p.cols; begin += p.group, ++block) {
    int const count = std::min(p.group, p.cols - begin);
    Parameters const parameters = measure(range_of(x + begin, count), p.offset == nullptr);
    std::int64_t const i = row * p.row_stride + block * p.block_stride;
    p.scale[i] = parameters.scale;
    if (p.offset != nullptr) p.offset[i] = parameters.offset;
    p.sum[i] = quantize_block(x + begin, count, parameters.scale, parameters.offset, q + begin);
  }
}

}  // namespace

void quantize_row_on_host(Problem const& p, DType x, int row, std::vector<float>& scratch) {
  quantize_row(p, row, as_float(p.x, x, row * p.stride_x, p.cols, scratch));
}

void run_on_host(Problem const& p, DType x) {
  std::vector<float> scratch;
  for (int row = 0; row < p.rows; ++row) quantize_row_on_host(p, x, row, scratch);
}

}  // namespace epiloq::ops::quantize_blockwise_int8
