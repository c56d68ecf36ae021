// Direct int8 convolution on the CPU for sums of few products: several pixels per weight loaded, in float32, which
// holds every partial sum exactly.

#include <algorithm>
#include <cstring>

#include "cpu/conv2d/int8.h"
#include "cpu/isa/versions.h"

namespace epiloq::ops::conv2d_int8 {
namespace {

constexpr int kPixels = 6;
constexpr int kSumBytes = 1 << 14;       // of a strip's sums, which stay in L1
constexpr int kPixelsOfSmallStrip = 24;  // where channels are many

// kLanes output channels of several pixels.
struct Block {
  float const* const* x;  // of each tap, the first pixel of the row
  std::int64_t offset;    // from there
  std::int64_t step;      // and from there to the next
  int taps, channels;     // channels: 0 for depthwise convolutions, one channel per lane
  float const* weight;    // [taps, channels or 1, kLanes]
  std::int32_t* acc;      // [pixels, lanes]
  int pixels, lanes;      // pixels: a multiple of kPixels
};

// With registers of kWidth floats: one or two per pixel, 12 accumulators in 16 registers.
template <int kWidth>
struct Direct {
  using Floats = typename Vectors<kWidth>::Floats;
  static constexpr int kVectors = std::min(2, kLanes / kWidth);

  template <bool kDepthwise>
  [[gnu::always_inline]] static void sum(Block const& s, int first, int lane) {
    Floats total[kPixels][kVectors] = {};
    float const* w = s.weight + lane;
    for (int tap = 0; tap < s.taps; ++tap) {
      float const* x = s.x[tap] + s.offset + first * s.step + (kDepthwise ? lane : 0);
      for (int c = 0; c < (kDepthwise ? 1 : s.channels); ++c, w += kLanes, ++x) {
        Floats weight[kVectors], value;
        for (int v = 0; v < kVectors; ++v) load(weight[v], w + v * kWidth);
#pragma GCC unroll 6
        for (int pixel = 0; pixel < kPixels; ++pixel) {
          float const* const at = x + pixel * s.step;
          for (int v = 0; v < kVectors; ++v) {
            if constexpr (kDepthwise) {
              load(value, at + v * kWidth);
              total[pixel][v] += value * weight[v];
            } else {
              total[pixel][v] += *at * weight[v];
            }
          }
        }
      }
    }
    std::int32_t* const acc = s.acc + static_cast<std::int64_t>(first) * s.lanes + lane;
    for (int pixel = 0; pixel < kPixels; ++pixel) {
      for (int v = 0; v < kVectors; ++v) {
        auto const sums = __builtin_convertvector(total[pixel][v], typename Vectors<kWidth>::Ints);
        std::memcpy(acc + pixel * s.lanes + v * kWidth, &sums, sizeof(sums));
      }
    }
  }

  [[gnu::always_inline]] static void run(Block const& s) {
    for (int first = 0; first < s.pixels; first += kPixels) {
      for (int lane = 0; lane < kLanes; lane += kVectors * kWidth) {
        s.channels == 0 ? sum<true>(s, first, lane) : sum<false>(s, first, lane);
      }
    }
  }
};

// [co / kLanes, terms, kLanes] of the weight [co, terms].
std::vector<Line> blocks_of_weight(Problem const& p, int terms) {
  std::vector<Line> weight(static_cast<std::size_t>(ceil_div(p.shape.co, kLanes) * terms));
  for (std::int64_t n = 0; n < p.shape.co; ++n) {
    for (int k = 0; k < terms; ++k) weight[n / kLanes * terms + k].values[n % kLanes] = p.weight[n * terms + k];
  }
  return weight;
}

}  // namespace

bool has_direct_kernel(conv2d::Shape const& s) {
  int const channels = s.ci / s.groups;
  return channels <= (s.groups == 1 ? kMaxDirectChannels : 1) && s.kh * s.kw * channels <= kMaxDirectTerms;
}

void direct_on_host(Problem const& p, std::int64_t first, std::int64_t last) {
  conv2d::Shape const& s = p.shape;
  bool const depthwise = s.groups > 1;
  int const taps = s.kh * s.kw, terms = taps * (s.ci / s.groups), blocks = static_cast<int>(ceil_div(s.co, kLanes));
  int const lanes = blocks * kLanes;
  static auto const sum_block = Versions<Direct, Block const&>::here();
  std::vector<Line> const weight = blocks_of_weight(p, terms);
  Finisher finisher(p.finish, s.co, p.out_dtype, p.out, s.out_pixel);
  TapRows rows(p, kPixels);
  int const strip = std::max(kPixelsOfSmallStrip, kSumBytes / (lanes * 4) / kPixels * kPixels);
  std::vector<std::int32_t> acc(static_cast<std::size_t>(strip) * lanes);
  for (std::int64_t row = first; row < last; ++row) {
    float const* const* const x = rows.of(row).data();
    for (int q = 0; q < s.q; q += strip) {
      int const pixels = std::min(strip, s.q - q), rounded = (pixels + kPixels - 1) / kPixels * kPixels;
      for (int b = 0; b < blocks; ++b) {
        sum_block({x, (depthwise ? b * rows.block() : 0) + q * rows.step(), rows.step(), taps, depthwise ? 0 : s.ci,
                   weight[static_cast<std::size_t>(b) * terms].values, acc.data() + b * kLanes, rounded, lanes});
      }
      if (lanes != s.co) {
        for (std::int64_t i = 1; i < pixels; ++i) std::copy_n(&acc[i * lanes], s.co, &acc[i * s.co]);
      }
      finisher.write(acc.data(), pixels, row * s.q + q);
    }
  }
}

}  // namespace epiloq::ops::conv2d_int8
