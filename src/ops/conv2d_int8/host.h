#pragma once

// What the CPU's convolutions share: rows of the image as taps meet them, and what becomes of sums.

#include <vector>

#include "ops/conv2d_int8/kernels.h"

namespace epiloq::ops::conv2d_int8 {

// From sums to outputs.
class Finisher {
 public:
  Finisher(Finish const& finish, int co, DType out_dtype, void* out, std::int64_t out_pixel);

  // acc [pixels, co] to the outputs from `pixel` on.
  void write(std::int32_t const* acc, std::int64_t pixels, std::int64_t pixel);

 private:
  Finish finish_;
  int co_, pixels_;
  DType dtype_;
  void* out_;
  std::int64_t out_pixel_;
  // Of every channel, for as many pixels side by side as make a loop worth its while.
  std::vector<float> scale_, bias_, limit_, restored_;
  std::vector<std::int32_t> correction_;
};

// Channels that are summed side by side.
inline constexpr int kLanes = 16;

// Rows of the image as float32, padded, with the pixels that a tap meets one after the other next to each other: a
// stride's phases are apart. A pixel is its channels; of depthwise convolutions the input of kLanes output channels, and
// such blocks are apart too. There is `slack` after each row.
class TapRows {
 public:
  TapRows(Problem const& problem, int slack);

  // For a row of the output, counted over all images: where each tap, [kh, kw], meets that row's first pixel. Until the
  // next call.
  std::vector<float const*> const& of(std::int64_t row);
  // Values from one pixel, and from one block, to the next.
  [[nodiscard]] int pixel() const { return pixel_; }
  [[nodiscard]] std::int64_t block() const { return block_; }

 private:
  void fill(std::int8_t const* from, float* to) const;

  Problem const& problem_;
  int pixel_, blocks_, width_;    // width: pixels of a phase
  std::vector<int> phases_;       // the strides' remainders that taps have
  std::vector<std::int64_t> at_;  // of each kw, in a row
  std::int64_t phase_, block_, size_;
  std::vector<float> rows_;  // the last is all padding
  std::vector<std::int64_t> held_;
  std::vector<float const*> taps_;
};

// Convolutions of one group of few channels, and depthwise ones, of so many products a sum that float32 holds it.
inline constexpr int kMaxDirectChannels = 4, kMaxDirectTerms = 1024;
bool has_direct_kernel(conv2d::Shape const& shape);
// Rows `first` to `last` of the output, counted over all images.
void direct_on_host(Problem const& problem, std::int64_t first, std::int64_t last);

}  // namespace epiloq::ops::conv2d_int8
