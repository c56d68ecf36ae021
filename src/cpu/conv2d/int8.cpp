// Epilogue of int8 convolutions on the CPU: defined in float64; computed in float32 where that provably rounds to the
// same int8, which is nearly everywhere. Loops vectorise.

#include "cpu/conv2d/int8.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu/common/rows.h"

namespace epiloq::ops::conv2d_int8 {
namespace {

constexpr int kWidth = 256;         // minimum number of outputs per loop,
constexpr int kMultiple = 64;       // in multiples of this,
constexpr int kMaxWidth = 2048;     // and at most this
constexpr float kDoubt = 0x1p-22f;  // three roundings of 2^-24 each, with a margin

struct Channels {
  float const *scale, *bias, *limit;
  std::int32_t const* correction;
};

// acc - correction may wrap; the true value fits.
inline std::int32_t corrected(std::int32_t acc, std::int32_t correction) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(acc) - static_cast<std::uint32_t>(correction));
}

// Whether no output can differ from the definition; NaN counts as uncertain. Clamping a rounded value to rounded limits
// gives the same as clamping before rounding, so one clamp applies the limits of f and of int8.
EPILOQ_CLONES bool requantize_fast(std::int32_t const* acc, Channels c, int count, Finish const& f, std::int8_t* out) {
  float const zero = static_cast<float>(f.output_zero), least = -128.f - zero, most = 127.f - zero;
  float const lo = std::clamp(std::nearbyint(f.lo), least, most), hi = std::clamp(std::nearbyint(f.hi), least, most);
  int doubts = 0;
  for (int n = 0; n < count; ++n) {
    float const product = static_cast<float>(corrected(acc[n], c.correction[n])) * c.scale[n];
    float const r = product + c.bias[n];
    float whole = std::nearbyint(r);
    doubts += !(std::fabs(r - whole) + kDoubt * std::fabs(product) < c.limit[n]);
    whole = whole > lo ? whole : lo;
    whole = whole < hi ? whole : hi;
    out[n] = static_cast<std::int8_t>(static_cast<std::int32_t>(whole + zero));
  }
  return doubts == 0;
}

EPILOQ_CLONES void requantize(std::int32_t const* acc, Channels c, int count, Finish const& f, std::int8_t* out) {
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
EPILOQ_CLONES void restore(std::int32_t const* acc, Channels c, int count, Finish const& f, float* out) {
  double const lo = f.lo, hi = f.hi;
  for (int n = 0; n < count; ++n) {
    double r = static_cast<double>(corrected(acc[n], c.correction[n])) * c.scale[n] + c.bias[n];
    r = r < lo ? lo : r;
    r = r > hi ? hi : r;
    out[n] = static_cast<float>(r);
  }
}

int pixels_at_once(int co) {
  int const some = kMultiple / std::gcd(co, kMultiple), width = some * co;
  return width > kMaxWidth ? std::max(1, kWidth / co) : some * static_cast<int>(ceil_div(kWidth, width));
}

}  // namespace

Finisher::Finisher(Finish const& f, int co, DType out_dtype, void* out, std::int64_t out_pixel)
    : finish_(f),
      co_(co),
      pixels_(out_pixel == co ? pixels_at_once(co) : 1),
      dtype_(out_dtype),
      out_(out),
      out_pixel_(out_pixel),
      restored_(out_dtype == DType::kInt8 ? 0 : static_cast<std::size_t>(pixels_) * co) {
  for (int pixel = 0; pixel < pixels_; ++pixel) {
    for (int n = 0; n < co; ++n) {
      scale_.push_back(f.scale[f.scale_is_vector ? n : 0]);
      bias_.push_back(f.bias != nullptr ? f.bias[n] : 0.f);
      limit_.push_back(0.5f - kDoubt * std::fabs(bias_.back()));
      correction_.push_back(f.correction != nullptr ? f.correction[n] : 0);
    }
  }
}

void Finisher::write(std::int32_t const* acc, std::int64_t pixels, std::int64_t pixel) {
  Channels const channels{scale_.data(), bias_.data(), limit_.data(), correction_.data()};
  for (std::int64_t const end = pixel + pixels; pixel < end; pixel += pixels_, acc += pixels_ * co_) {
    int const count = static_cast<int>(std::min<std::int64_t>(pixels_, end - pixel)) * co_;
    if (dtype_ == DType::kInt8) {
      std::int8_t* const row = static_cast<std::int8_t*>(out_) + pixel * out_pixel_;
      if (!requantize_fast(acc, channels, count, finish_, row)) requantize(acc, channels, count, finish_, row);
    } else {
      restore(acc, channels, count, finish_, restored_.data());
      write_row(restored_.data(), count, dtype_, out_, pixel * out_pixel_);
    }
  }
}

void finish_on_host(std::int32_t const* acc, std::int64_t rows, int co, Finish const& f, DType out_dtype, void* out,
                    std::int64_t out_pixel) {
  if (rows != 0 && co != 0) Finisher(f, co, out_dtype, out, out_pixel).write(acc, rows, 0);
}

}  // namespace epiloq::ops::conv2d_int8
