#pragma once

// Shared by the CPU convolutions: im2col rows of the image, and the epilogue.

#include <vector>

#include "core/ceil_div.h"
#include "cpu/isa/vectors.h"
#include "problems/conv2d_int8.h"

namespace epiloq::ops::conv2d_int8 {

// The epilogue.
class Finisher {
 public:
  Finisher(Finish const& finish, int co, DType out_dtype, void* out, std::int64_t out_pixel);

  // Converts acc [pixels, co] to the outputs from `pixel` on.
  void write(std::int32_t const* acc, std::int64_t pixels, std::int64_t pixel);

 private:
  Finish finish_;
  int co_, pixels_;
  DType dtype_;
  void* out_;
  std::int64_t out_pixel_;
  // Per channel, repeated for enough pixels to fill a vector loop.
  std::vector<float> scale_, bias_, limit_, restored_;
  std::vector<std::int32_t> correction_;
};

// Channels that are summed together: one Line.
inline constexpr int kLanes = 16;

// Rows of the image as float32, padded. For depthwise convolutions they are reordered: kLanes channels of a pixel are
// adjacent (as in the output), followed by the next pixel that the same tap reads, so phases of the stride and blocks
// of channels are separate. Otherwise rows keep their order.
class TapRows {
 public:
  // This many pixels past the end may be read.
  TapRows(Problem const& problem, int slack);

  // For a row of the output, counted over all images: the input address of each tap [kh, kw] for the row's first pixel.
  // Valid until the next call.
  std::vector<float const*> const& of(std::int64_t row);
  // Elements from one pixel of a tap to the next, and from one block of channels to the next.
  [[nodiscard]] std::int64_t step() const { return step_; }
  [[nodiscard]] std::int64_t block() const { return block_; }

 private:
  void fill(std::int8_t const* from, float* to) const;

  Problem const& problem_;
  bool depthwise_;
  int apart_;                     // number of phases
  int pixel_, width_;             // elements per pixel of a block, pixels per phase
  std::vector<int> phases_;       // those used by taps
  std::vector<std::int64_t> at_;  // of each kw, in a row
  std::int64_t step_, block_, size_;
  std::vector<Line> rows_;  // the last is all padding
  std::vector<std::int64_t> held_;
  std::vector<float const*> taps_;
};

// Convolutions with few channels in one group, and depthwise ones, whose sums float32 holds exactly.
inline constexpr int kMaxDirectChannels = 4, kMaxDirectTerms = 1024;
bool has_direct_kernel(conv2d::Shape const& shape);
// Rows `first` to `last` of the output, counted over all images.
void direct_on_host(Problem const& problem, std::int64_t first, std::int64_t last);

}  // namespace epiloq::ops::conv2d_int8
