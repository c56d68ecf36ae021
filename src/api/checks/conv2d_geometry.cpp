#include "api/checks/conv2d_geometry.h"

namespace epiloq::ops::conv2d {
namespace {

constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1;
// With images, padding, strides and dilations up to this every coordinate fits an int.
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 30;
constexpr std::int64_t kMaxStep = std::int64_t{1} << 20;

void check_geometry(Checker const& check, Conv2dGeometry const& g) {
  auto const expect = [&](char const* argument, std::int64_t value, std::int64_t least) {
    if (value < least || value > kMaxStep)
      check.fail(argument, "expected values from ", least, " to ", kMaxStep, ", got ", value);
  };
  for (std::int64_t stride : g.stride) expect("stride", stride, 1);
  for (std::int64_t padding : g.padding) expect("padding", padding, 0);
  for (std::int64_t dilation : g.dilation) expect("dilation", dilation, 1);
  expect("groups", g.groups, 1);
}

struct Axis {
  std::int64_t size, kernel, before, after, stride, dilation;
};

// Number of outputs along an axis.
std::int64_t count(Checker const& check, char const* name, Axis const& a) {
  std::int64_t const padded = a.size + a.before + a.after, reach = a.dilation * (a.kernel - 1) + 1;
  if (reach > padded) {
    check.fail("x", "expected a ", name, " of at least ", reach, " with the padding (kernel ", a.kernel, ", dilation ",
               a.dilation, "), got ", a.size, " + ", a.before + a.after);
  }
  return (padded - reach) / a.stride + 1;
}

void check_sizes(Checker const& check, TensorView const& x, Kernel const& k, std::int64_t groups) {
  if (x.rank != 4) check.fail("x", "expected 4 dimensions [B, H, W, Ci], got ", describe(x));
  if (k.kh < 1 || k.kw < 1 || k.channels < 1 || k.kh > kMaxStep || k.kw > kMaxStep) {
    check.fail("weight", "expected a kernel with at least one tap and one channel, got ", k.kh, " x ", k.kw, " x ",
               k.channels);
  }
  if (x.size(1) < 1 || x.size(2) < 1) check.fail("x", "expected an image of at least one pixel, got ", describe(x));
  if (k.co % groups != 0) check.fail("groups", "expected a divisor of ", k.co, " output channels, got ", groups);
  if (x.size(3) != k.channels * groups) {
    check.fail("x", "expected ", k.channels * groups, " channels (", k.channels, " of the weight in each of ", groups,
               " groups), got ", describe(x));
  }
  if (x.numel() != 0 && x.size(3) > 1 && x.stride(3) != 1) {
    check.fail("x", "expected dense channels (stride 1 in the last dimension), got stride ", x.stride(3), " in ",
               describe(x), "; call .contiguous()");
  }
  for (int i = 0; i < 4; ++i) {
    if (x.size(i) > kMaxExtent) check.fail("x", "expected sizes of at most ", kMaxExtent, ", got ", describe(x));
  }
}

}  // namespace

Shape checked_shape(Checker const& check, TensorView const& out, TensorView const& x, Kernel const& k,
                    Conv2dGeometry const& g) {
  check_geometry(check, g);
  check_sizes(check, x, k, g.groups);
  auto const [top, bottom, left, right] = g.padding;
  std::int64_t const p = count(check, "height", {x.size(1), k.kh, top, bottom, g.stride[0], g.dilation[0]});
  std::int64_t const q = count(check, "width", {x.size(2), k.kw, left, right, g.stride[1], g.dilation[1]});
  Matrix const pixels = check.rows("out", out);
  if (out.rank != 4 || out.size(0) != x.size(0) || out.size(1) != p || out.size(2) != q || out.size(3) != k.co) {
    check.fail("out", "expected [", x.size(0), ", ", p, ", ", q, ", ", k.co, "], got ", describe(out));
  }
  if (pixels.rows > kMaxSize || k.co > kMaxSize) {
    check.fail("out", "expected at most ", kMaxSize, " pixels and channels, got ", describe(out));
  }
  auto const small = [](std::int64_t value) { return static_cast<int>(value); };
  return {small(x.size(0)),   small(x.size(1)), small(x.size(2)), small(x.size(3)),     small(p),
          small(q),           small(k.co),      small(k.kh),      small(k.kw),          small(g.stride[0]),
          small(g.stride[1]), small(top),       small(left),      small(g.dilation[0]), small(g.dilation[1]),
          small(g.groups),    x.stride(0),      x.stride(1),      x.stride(2),          pixels.stride};
}

}  // namespace epiloq::ops::conv2d
