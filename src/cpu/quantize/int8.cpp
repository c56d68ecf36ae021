// quantize_int8 on the CPU: the kernels' definition, row by row, in code that compilers vectorise.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/float8.h"
#include "cpu/common/rows.h"
#include "problems/quantizers/quantize_int8.h"

namespace epiloq::ops::quantize_int8 {
namespace {

EPILOQ_CLONES void quantize_row(float const* x, int count, float scale, float azp, std::int8_t* q) {
  for (int i = 0; i < count; ++i) {
    float rounded = std::nearbyint(x[i] / scale);
    rounded = rounded == rounded ? rounded : 0.f;
    float const shifted = rounded + azp;
    float const low = shifted < -128.f ? -128.f : shifted;
    q[i] = static_cast<std::int8_t>(static_cast<int>(low > 127.f ? 127.f : low));
  }
}

struct Parameters {
  float scale, azp;
};

Parameters measure(Range range, bool symmetric, bool range_includes_zero) {
  if (range.has_nan) return {std::numeric_limits<float>::quiet_NaN(), 0.f};
  if (symmetric) return {std::max(std::max(-range.lo, range.hi) / 127.f, kSmallestScale), 0.f};
  if (range_includes_zero || range.lo == range.hi) range = {std::min(range.lo, 0.f), std::max(range.hi, 0.f), false};
  float const step = (range.hi - range.lo) / 255.f;
  float const scale = step < kSmallestScale ? kSmallestScale : step;
  float const azp = std::nearbyint(-128.f - range.lo / scale);
  return {scale, azp == azp ? azp : 0.f};
}

// As the GPU converts: saturated to int32.
std::int32_t saturate(float value) {
  constexpr double kMin = std::numeric_limits<std::int32_t>::min(), kMax = std::numeric_limits<std::int32_t>::max();
  return static_cast<std::int32_t>(std::clamp(static_cast<double>(value), kMin, kMax));
}

Parameters parameters_of(Problem const& p, int row, float const* x) {
  if (p.is_static) {
    int const i = p.per_row ? row : 0;
    return {p.scale[i], p.azp != nullptr ? static_cast<float>(p.azp[i]) : 0.f};
  }
  Parameters const measured = measure(range_of(x, p.cols), p.azp == nullptr, p.range_includes_zero);
  p.scale[row] = measured.scale;
  if (p.azp != nullptr) p.azp[row] = saturate(measured.azp);
  return measured;
}

}  // namespace

void run_on_host(Problem const& p, DType x) {
  std::vector<float> scratch;
  for (int row = 0; row < p.rows; ++row) {
    float const* const values = as_float(p.x, x, row * p.stride_x, p.cols, scratch);
    std::int8_t* const q = p.q + row * p.stride_q;
    Parameters const parameters = parameters_of(p, row, values);
    quantize_row(values, p.cols, parameters.scale, parameters.azp, q);
    if (p.padded_cols > p.cols) std::memset(q + p.cols, 0, p.padded_cols - p.cols);
  }
}

}  // namespace epiloq::ops::quantize_int8
