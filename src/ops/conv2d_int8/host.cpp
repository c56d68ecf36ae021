// From sums to outputs on the CPU: the definition in float64, in loops that compilers vectorise. Where float32 cannot
// be wrong about int8, which is nearly everywhere, it decides.

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/host_rows.h"
#include "ops/conv2d_int8/kernels.h"

namespace epiloq::ops::conv2d_int8 {
namespace {

constexpr int kWidth = 256;         // outputs that a loop should have at least
constexpr float kDoubt = 0x1p-22f;  // three roundings of 2^-24 each, and some

// Parameters of every channel, for so many pixels side by side as make a loop worth its while.
struct Channels {
  int pixels;
  std::vector<float> scale, bias;
  std::vector<std::int32_t> correction;

  Channels(Finish const& f, int co, bool dense) : pixels(dense ? std::max(1, kWidth / co) : 1) {
    for (int pixel = 0; pixel < pixels; ++pixel) {
      for (int n = 0; n < co; ++n) {
        scale.push_back(f.scale[f.scale_is_vector ? n : 0]);
        bias.push_back(f.bias != nullptr ? f.bias[n] : 0.f);
        correction.push_back(f.correction != nullptr ? f.correction[n] : 0);
      }
    }
  }
};

// acc - correction may wrap on the way to a true value that fits.
inline std::int32_t corrected(std::int32_t acc, std::int32_t correction) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(acc) - static_cast<std::uint32_t>(correction));
}

// Whether no output can differ from the definition's.
EPILOQ_CLONES bool requantize_fast(std::int32_t const* acc, Channels const& c, int count, Finish const& f,
                                   std::int8_t* out) {
  float const *const scale = c.scale.data(), *const bias = c.bias.data();
  std::int32_t const* const correction = c.correction.data();
  float const lo = f.lo, hi = f.hi, zero = static_cast<float>(f.output_zero);
  int doubts = 0;
  for (int n = 0; n < count; ++n) {
    float const product = static_cast<float>(corrected(acc[n], correction[n])) * scale[n];
    float r = product + bias[n];
    float const from_whole = std::fabs(r - std::nearbyint(r));
    doubts += !(from_whole + kDoubt * (std::fabs(product) + std::fabs(bias[n])) < 0.5f);
    r = r == r ? r : 0.f;
    r = r < lo ? lo : r;
    r = r > hi ? hi : r;
    r = std::nearbyint(r) + zero;
    r = r < -128.f ? -128.f : r;
    r = r > 127.f ? 127.f : r;
    out[n] = static_cast<std::int8_t>(static_cast<std::int32_t>(r));
  }
  return doubts == 0;
}

EPILOQ_CLONES void requantize(std::int32_t const* acc, Channels const& c, int count, Finish const& f,
                              std::int8_t* out) {
  double const lo = f.lo, hi = f.hi;
  for (int n = 0; n < count; ++n) {
    double r = static_cast<double>(corrected(acc[n], c.correction[n])) * c.scale[n] + c.bias[n];
    r = r == r ? r : 0.;
    r = r < lo ? lo : r;
    r = r > hi ? hi : r;
    r = std::nearbyint(r) + f.output_zero;
    out[n] = static_cast<std::int8_t>(std::clamp(r, -128., 127.));
  }
}

// NaN passes the clamp.
EPILOQ_CLONES void restore(std::int32_t const* acc, Channels const& c, int count, Finish const& f, float* out) {
  double const lo = f.lo, hi = f.hi;
  for (int n = 0; n < count; ++n) {
    double r = static_cast<double>(corrected(acc[n], c.correction[n])) * c.scale[n] + c.bias[n];
    r = r < lo ? lo : r;
    r = r > hi ? hi : r;
    out[n] = static_cast<float>(r);
  }
}

}  // namespace

void finish_on_host(std::int32_t const* acc, std::int64_t rows, int co, Finish const& f, DType out_dtype, void* out,
                    std::int64_t out_pixel) {
  if (rows == 0 || co == 0) return;
  Channels const c(f, co, out_pixel == co);
  std::vector<float> restored(static_cast<std::size_t>(c.pixels) * co);
  for (std::int64_t i = 0; i < rows; i += c.pixels, acc += static_cast<std::int64_t>(c.pixels) * co) {
    int const count = static_cast<int>(std::min<std::int64_t>(c.pixels, rows - i)) * co;
    if (out_dtype == DType::kInt8) {
      std::int8_t* const row = static_cast<std::int8_t*>(out) + i * out_pixel;
      if (!requantize_fast(acc, c, count, f, row)) requantize(acc, c, count, f, row);
    } else {
      restore(acc, c, count, f, restored.data());
      write_row(restored.data(), count, out_dtype, out, i * out_pixel);
    }
  }
}

}  // namespace epiloq::ops::conv2d_int8
