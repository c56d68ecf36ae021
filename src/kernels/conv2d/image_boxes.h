#pragma once

// The rows of im2col.h as TMA's im2col mode loads them: a box is consecutive output pixels by consecutive channels of
// one tap. From a given pixel on, TMA walks over the pixels' first taps, bounded by the tensor map's corners, with the
// convolution's strides through rows and images, and adds the offset of the box's tap. Out-of-bounds elements are zero.
// (PTX ISA, "im2col mode"; coordinates as in CUTLASS's copy_traits_sm90_im2col.hpp.)

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "kernels/conv2d/im2col.h"

namespace epiloq::ops::conv2d {

// The tensor map's description of x, widths before heights.
struct ImageMap {
  std::array<std::uint64_t, 4> sizes;    // channels, w, h, images
  std::array<std::uint64_t, 3> strides;  // bytes between pixels, rows and images
  std::array<int, 2> lower, upper;       // first taps, relative to the first and the last pixel of the image
  std::array<std::uint32_t, 4> steps;    // between first taps
};

// None if TMA has no map of these sizes (cuTensorMapEncodeIm2col's limits for four dimensions). A dimension of size one
// may have any stride in x and gets that of dense memory.
inline std::optional<ImageMap> image_map_of(Shape const& s, int element_bytes) {
  auto const u32 = [](int value) { return static_cast<std::uint32_t>(value); };
  std::int64_t const pixel = s.w > 1 ? s.x_pixel : s.ci, row = s.h > 1 ? s.x_row : s.w * pixel,
                     image = s.batch > 1 ? s.x_image : s.h * row;
  constexpr std::int64_t kUnit = 16, kMostBytes = (std::int64_t{1} << 40) - 1;
  bool const nested = pixel >= s.ci && row >= s.w * pixel && row % pixel == 0 && image >= s.h * row && image % row == 0;
  if (!nested || pixel * element_bytes % kUnit != 0 || image > kMostBytes / element_bytes) return {};

  constexpr int kMostStep = 8, kLowest = -128, kHighest = 127, kMostOffset = 255;
  std::array<int, 2> const lower{-s.left, -s.top};
  std::array<int, 2> const upper{(s.q - 1) * s.stride_w - s.left - (s.w - 1),
                                 (s.p - 1) * s.stride_h - s.top - (s.h - 1)};
  auto const is_corner = [](int at) { return at >= kLowest && at <= kHighest; };
  bool const has_corners =
      std::all_of(lower.begin(), lower.end(), is_corner) && std::all_of(upper.begin(), upper.end(), is_corner);
  std::int64_t const reach = std::max(std::int64_t{s.kw - 1} * s.dilation_w, std::int64_t{s.kh - 1} * s.dilation_h);
  if (!has_corners || reach > kMostOffset || s.stride_w > kMostStep || s.stride_h > kMostStep) return {};

  auto const bytes = [&](std::int64_t elements) { return static_cast<std::uint64_t>(elements * element_bytes); };
  return ImageMap{{u32(s.ci), u32(s.w), u32(s.h), u32(s.batch)},
                  {bytes(pixel), bytes(row), bytes(image)},
                  lower,
                  upper,
                  {1, u32(s.stride_w), u32(s.stride_h), 1}};
}

// TMA coordinates: the first pixel's first tap, the first channel, and the tap's offset.
struct FirstTap {
  int x, y, image;
};
struct Box {
  int channel;
  std::uint16_t x, y;
};

EPILOQ_HD inline FirstTap first_tap_of(Shape const& s, unsigned pixel) {
  unsigned const line = pixel / s.q;
  return {static_cast<int>(pixel % s.q) * s.stride_w - s.left, static_cast<int>(line % s.p) * s.stride_h - s.top,
          static_cast<int>(line / s.p)};
}

// For groups = 1. Past the last tap: channels out of bounds.
EPILOQ_HD inline Box box_of(Shape const& s, Column column) {
  if (column.kh >= s.kh) return {s.ci, 0, 0};
  return {column.channel, static_cast<std::uint16_t>(column.kw * s.dilation_w),
          static_cast<std::uint16_t>(column.kh * s.dilation_h)};
}

}  // namespace epiloq::ops::conv2d
