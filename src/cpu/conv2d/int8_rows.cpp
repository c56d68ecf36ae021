// im2col: rows of an image per kernel tap, padding included.

#include <algorithm>

#include "cpu/common/rows.h"
#include "cpu/conv2d/int8.h"

namespace epiloq::ops::conv2d_int8 {
namespace {

constexpr int round_up_quotient(int a, int b) { return a > 0 ? (a + b - 1) / b : 0; }

EPILOQ_CLONES void widen(std::int8_t const* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Whole blocks of some pixels, `step` apart.
EPILOQ_CLONES void widen_blocks(std::int8_t const* from, std::int64_t step, int pixels, int blocks, float* to,
                                std::int64_t block) {
  for (int pixel = 0; pixel < pixels; ++pixel, from += step, to += kLanes) {
    for (int b = 0; b < blocks; ++b) {
      for (int l = 0; l < kLanes; ++l) to[b * block + l] = from[b * kLanes + l];
    }
  }
}

}  // namespace

TapRows::TapRows(Problem const& problem, int slack) : problem_(problem) {
  conv2d::Shape const& s = problem.shape;
  depthwise_ = s.groups > 1;
  apart_ = depthwise_ ? s.stride_w : 1;
  pixel_ = depthwise_ ? kLanes : s.ci;
  width_ = (s.q - 1) * s.stride_w / apart_ + (s.kw - 1) * s.dilation_w / apart_ + 1;
  for (int j = 0; j < s.kw; ++j) {
    int const column = j * s.dilation_w, phase = column % apart_;
    auto const found = std::find(phases_.begin(), phases_.end(), phase);
    at_.push_back(((found - phases_.begin()) * width_ + column / apart_) * pixel_);
    if (found == phases_.end()) phases_.push_back(phase);
  }
  step_ = std::int64_t{pixel_} * (depthwise_ || s.q == 1 ? 1 : s.stride_w);
  block_ = static_cast<std::int64_t>(phases_.size()) * width_ * pixel_;
  size_ = ceil_div((depthwise_ ? ceil_div(s.co, kLanes) : 1) * block_ + slack * step_, kLanes) * kLanes;
  // Taps of one output row read at most this many rows, so rows this far apart may share a buffer.
  int const rows = std::min(s.h, (s.kh - 1) * s.dilation_h + 1);
  Line padding;
  std::fill_n(padding.values, kLanes, static_cast<float>(problem.input_zero));
  rows_.assign(static_cast<std::size_t>((rows + 1) * size_ / kLanes), padding);
  held_.assign(rows, -1);
  taps_.resize(static_cast<std::size_t>(s.kh) * s.kw);
}

std::vector<float const*> const& TapRows::of(std::int64_t row) {
  conv2d::Shape const& s = problem_.shape;
  std::int64_t const image = row / s.p;
  int const places = static_cast<int>(held_.size());
  for (int i = 0; i < s.kh; ++i) {
    int const y = static_cast<int>(row % s.p) * s.stride_h + i * s.dilation_h - s.top;
    bool const inside = y >= 0 && y < s.h;
    int const place = inside ? y % places : places;
    float* const at = rows_.data()->values + place * size_;
    if (inside && held_[place] != image * s.h + y) {
      fill(problem_.x + image * s.x_image + y * s.x_row, at);
      held_[place] = image * s.h + y;
    }
    for (int j = 0; j < s.kw; ++j) taps_[i * s.kw + j] = at + at_[j];
  }
  return taps_;
}

// Padding is written once, in advance.
void TapRows::fill(std::int8_t const* from, float* to) const {
  conv2d::Shape const& s = problem_.shape;
  std::int64_t const step = apart_ * s.x_pixel;
  int const channels = depthwise_ ? s.co : s.ci, copies = channels / s.ci;
  int const whole = depthwise_ && copies == 1 ? s.ci / kLanes : 0;
  for (int const phase : phases_) {
    int const first = std::min(round_up_quotient(s.left - phase, apart_), width_);
    int const count = std::clamp(round_up_quotient(s.w + s.left - phase, apart_), first, width_) - first;
    std::int8_t const* const x = from + (std::int64_t{first} * apart_ + phase - s.left) * s.x_pixel;
    float* const at = to + std::int64_t{first} * pixel_;
    if (!depthwise_ && step == s.ci) {
      widen(x, std::int64_t{count} * s.ci, at);
    } else {
      widen_blocks(x, step, count, whole, at, block_);
      for (int n = whole * kLanes; n < channels; ++n) {
        float* const lane = at + n / pixel_ * block_ + n % pixel_;
        for (std::int64_t i = 0; i < count; ++i) lane[i * pixel_] = x[i * step + n / copies];
      }
    }
    to += std::int64_t{width_} * pixel_;
  }
}

}  // namespace epiloq::ops::conv2d_int8
