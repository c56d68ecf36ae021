// The address arithmetic of the convolutions' kernels, which they share with the host: every element of the matrix that
// is never in memory, against the definition.

#include <cstdint>
#include <vector>

#include "check.h"
#include "epilogue/eval.h"
#include "epilogue/library.h"
#include "kernels/conv2d/image_boxes.h"

namespace conv = epiloq::ops::conv2d;

namespace {

int between(std::mt19937& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

// Any shape, with kernels larger than the image if the padding allows it.
conv::Shape random_shape(std::mt19937& random) {
  auto const pick = [&random](int low, int high) { return between(random, low, high); };
  conv::Shape s{};
  s.batch = pick(1, 3), s.h = pick(1, 12), s.w = pick(1, 12), s.ci = pick(1, 40), s.co = 1, s.groups = 1;
  s.kh = pick(1, 5), s.kw = pick(1, 5), s.stride_h = pick(1, 3), s.stride_w = pick(1, 3);
  s.dilation_h = pick(1, 3), s.dilation_w = pick(1, 3), s.top = pick(0, 12), s.left = pick(0, 12);
  s.p = pick(1, 8), s.q = pick(1, 8);
  s.x_pixel = s.ci + pick(0, 5), s.x_row = s.x_pixel * s.w + pick(0, 7), s.x_image = s.x_row * s.h + pick(0, 9);
  return s;
}

// Where the definition says that an element lies, or -1 for outside.
std::int64_t expected(conv::Shape const& s, int channels, unsigned m, int k) {
  int const tap = k / channels, c = k % channels;
  if (m >= static_cast<unsigned>(s.batch * s.p * s.q) || tap >= s.kh * s.kw) return -1;
  int const q = static_cast<int>(m) % s.q, p = static_cast<int>(m) / s.q % s.p, image = static_cast<int>(m) / s.q / s.p;
  int const y = p * s.stride_h + tap / s.kw * s.dilation_h - s.top;
  int const x = q * s.stride_w + tap % s.kw * s.dilation_w - s.left;
  if (y < 0 || y >= s.h || x < 0 || x >= s.w) return -1;
  return image * s.x_image + y * s.x_row + x * s.x_pixel + c;
}

void walks_visit_what_the_definition_says() {
  std::mt19937 random = test::generator();
  for (int round = 0; round < 300; ++round) {
    conv::Shape const s = random_shape(random);
    int const channels = s.ci + between(random, 0, 8);  // with padding in the weight
    int const step = between(random, 1, 130), begin = between(random, 0, step - 1);
    conv::Column column = conv::Column::of(s, channels, begin), by = conv::Column::of(s, channels, step);
    for (int k = begin; k < s.kh * s.kw * channels + 2 * step; k += step, column.advance(s, channels, by)) {
      conv::Offset const offset(s, column);
      for (unsigned m = 0; m < conv::pixels(s) + 3; ++m) {
        conv::Window const window = conv::window_of(s, m);
        CHECK_EQUAL(is_inside(s, window, offset) ? window.at + offset.at : -1, expected(s, channels, m, k));
      }
    }
  }
}

constexpr int kHalf = 2;  // bytes

// Where TMA finds the elements of a box's channel, pixel by pixel; -1 for zeros.
std::vector<std::int64_t> copied(conv::ImageMap const& map, conv::FirstTap at, conv::Box box, int channel, int pixels) {
  auto const size = [&map](int i) { return static_cast<int>(map.sizes[i]); };
  auto const stride = [&map](int i) { return static_cast<std::int64_t>(map.strides[i] / kHalf); };
  auto const is_in = [&size](int at, int i) { return at >= 0 && at < size(i); };
  std::vector<std::int64_t> elements;
  for (int i = 0; i < pixels; ++i) {
    int const c = box.channel + channel, x = at.x + box.x, y = at.y + box.y;
    bool const there = is_in(c, 0) && is_in(x, 1) && is_in(y, 2) && is_in(at.image, 3);
    elements.push_back(there ? c + x * stride(0) + y * stride(1) + at.image * stride(2) : -1);
    if ((at.x += static_cast<int>(map.steps[1])) <= size(1) - 1 + map.upper[0]) continue;
    at.x = map.lower[0];
    if ((at.y += static_cast<int>(map.steps[2])) <= size(2) - 1 + map.upper[1]) continue;
    at.y = map.lower[1];
    ++at.image;
  }
  return elements;
}

void boxes_hold_what_the_definition_says() {
  std::mt19937 random = test::generator();
  constexpr int kColumns = 64, kPixels = 16;
  for (int round = 0; round < 200; ++round) {
    conv::Shape s = random_shape(random);
    s.ci = 8 * between(random, 1, 20);
    s.x_pixel = s.ci + (s.w > 1 ? 8 * between(random, 0, 2) : 0);
    s.x_row = s.x_pixel * (s.w + (s.h > 1 ? between(random, 0, 2) : 0));
    s.x_image = s.x_row * (s.h + between(random, 0, 2));
    int const channels = s.kh * s.kw == 1 ? s.ci : (s.ci + kColumns - 1) / kColumns * kColumns;
    auto const map = conv::image_map_of(s, kHalf);
    CHECK(map.has_value());
    if (!map) continue;
    int const first_column = between(random, 0, 3) * kColumns, first_pixel = between(random, 0, 3) * kPixels;
    conv::Column column = conv::Column::of(s, channels, first_column);
    for (int k = first_column; k < s.kh * s.kw * channels + 3 * kColumns; k += kColumns) {
      auto const at = conv::first_tap_of(s, static_cast<unsigned>(first_pixel));
      for (int channel : {0, between(random, 0, kColumns - 1)}) {
        auto const elements = copied(*map, at, box_of(s, column), channel, kPixels);
        int const c = k % channels + channel;  // past the channels of the image, those of a padded weight
        for (int i = 0; i < kPixels; ++i) {
          auto const m = static_cast<unsigned>(first_pixel + i);
          CHECK_EQUAL(elements[i], c < s.ci ? expected(s, channels, m, k + channel) : -1);
        }
      }
      column.advance(s, channels, {0, 0, kColumns});
    }
  }
}

conv::Shape dense_shape() {
  conv::Shape s{};
  s.batch = 2, s.h = s.w = 14, s.ci = 64, s.co = 1, s.groups = 1, s.kh = s.kw = 3, s.p = s.q = 14;
  s.stride_h = s.stride_w = 1, s.top = s.left = 1, s.dilation_h = s.dilation_w = 1;
  s.x_pixel = s.ci, s.x_row = s.x_pixel * s.w, s.x_image = s.x_row * s.h;
  return s;
}

void maps_keep_within_the_hardware() {
  auto const has_map = [](auto change) {
    conv::Shape s = dense_shape();
    change(s);
    return conv::image_map_of(s, kHalf).has_value();
  };
  using Shape = conv::Shape;
  CHECK(has_map([](Shape&) {}));
  CHECK(has_map([](Shape& s) { s.left = 128, s.q = 14; }));
  CHECK(!has_map([](Shape& s) { s.left = 129; }));
  CHECK(has_map([](Shape& s) { s.q = 142; }));  // the last first tap 127 past the last pixel
  CHECK(!has_map([](Shape& s) { s.q = 143; }));
  CHECK(has_map([](Shape& s) { s.stride_w = 8; }) && !has_map([](Shape& s) { s.stride_w = 9; }));
  CHECK(has_map([](Shape& s) { s.kh = 52, s.dilation_h = 5; }) && !has_map([](Shape& s) { s.kh = 257; }));
  CHECK(!has_map([](Shape& s) { s.x_pixel = 60; }));                     // pixels overlap
  CHECK(!has_map([](Shape& s) { s.x_pixel = 68, s.x_row = 68 * 14; }));  // off 16 bytes
  CHECK(!has_map([](Shape& s) { s.x_row += 8; }));                       // no multiple of a pixel
  CHECK(!has_map([](Shape& s) { s.x_image = 0; }));                      // the same image twice
  CHECK(has_map([](Shape& s) { s.batch = 1, s.x_image = 0; }));          // but one alone may lie anywhere
  CHECK(!has_map([](Shape& s) { s.x_image = s.x_row * (std::int64_t{1} << 35); }));
}

void the_largest_images_stay_outside_of_nowhere() {
  conv::Shape s{};
  s.batch = 1, s.p = s.q = 1, s.kh = s.kw = 1, s.stride_h = s.stride_w = 1, s.dilation_h = s.dilation_w = 1;
  s.h = s.w = conv::kMaxSide, s.x_row = conv::kMaxStride;
  conv::Column last = conv::Column::of(s, 1, 0);
  last.kh = 1;
  CHECK(!is_inside(s, conv::window_of(s, 1), conv::Offset(s, conv::Column{0, 0, 0})));
  CHECK(!is_inside(s, conv::window_of(s, 0), conv::Offset(s, last)));
  CHECK(!is_inside(s, conv::window_of(s, 1), conv::Offset(s, last)));
  CHECK(is_inside(s, conv::Window{0, s.h - 1, s.w - 1}, conv::Offset(s, conv::Column{0, 0, 0})));
  CHECK(conv::fits(s));
  s.h += 1;
  CHECK(!conv::fits(s));
}

void an_expression_at_a_column_is_the_expression() {
  namespace ep = epiloq::epilogue;
  float const scale[] = {0.5f, 2.f, -1.f}, bias[] = {1.f, -2.f, 100.f};
  auto const all = ep::Restored::make<float>(scale, true, bias, -3.f, 7.f);
  for (int n = 0; n < 3; ++n) {
    for (int acc : {-1000, -3, 0, 2, 5, 1000}) {
      float const value = std::min(std::max(scale[n] * static_cast<float>(acc) + bias[n], -3.f), 7.f);
      CHECK_EQUAL(ep::eval(all, acc, 0, n), value);
      CHECK_EQUAL(ep::eval(ep::at_column(all, n), acc, 0, 0), value);
    }
  }
  auto const in_double = ep::Restored::make<double>(scale, false, nullptr, -1e9f, 1e9f);
  CHECK_EQUAL(ep::eval(in_double, (1 << 24) + 1, 0, 2), 0.5 * ((1 << 24) + 1));
}

}  // namespace

int main() {
  walks_visit_what_the_definition_says();
  boxes_hold_what_the_definition_says();
  maps_keep_within_the_hardware();
  the_largest_images_stay_outside_of_nowhere();
  an_expression_at_a_column_is_the_expression();
  return test::failures != 0;
}
