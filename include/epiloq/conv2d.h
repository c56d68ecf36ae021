#pragma once

#include <array>
#include <cstdint>

namespace epiloq {

// How a kernel moves over an image. Tensors are NHWC: x [B, H, W, Ci], weight [Co, Kh, Kw, Ci / groups],
// out [B, P, Q, Co], with
//
//   out[b, p, q, n] = sum over kh, kw, c of x[b, p stride_h + kh dilation_h - top, q stride_w + kw dilation_w - left,
//                                             (n / (Co / groups)) (Ci / groups) + c]  weight[n, kh, kw, c]
//
// where a place outside the image counts as the number 0 (of a quantised x: holds its zero point).
struct Conv2dGeometry {
  std::array<std::int64_t, 2> stride{1, 1};         // height, width
  std::array<std::int64_t, 4> padding{0, 0, 0, 0};  // top, bottom, left, right
  std::array<std::int64_t, 2> dilation{1, 1};
  std::int64_t groups = 1;
};

}  // namespace epiloq
