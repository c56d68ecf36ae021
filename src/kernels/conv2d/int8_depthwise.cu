// int8 depthwise convolution, with one or more outputs per channel.

#include "core/cuda_check.h"
#include "kernels/conv2d/depthwise.cuh"
#include "kernels/conv2d/int8_epilogue.cuh"
#include "kernels/launch/conv2d_int8.h"

namespace epiloq::ops::conv2d_int8 {
namespace {

namespace depthwise = conv2d::depthwise;
using depthwise::kMaxLanes, depthwise::kPixels, depthwise::kThreads;

constexpr int kTaps = 64;  // taps whose weights are in shared memory at a time

struct DepthwiseProblem {
  Problem problem;
  depthwise::Plan plan;
  unsigned fill;
  bool whole_runs;
};

// kChannels neighbouring bytes as the low bytes of a word.
template <int kChannels>
__device__ __forceinline__ unsigned load(std::int8_t const* from) {
  if constexpr (kChannels == 4) return *reinterpret_cast<unsigned const*>(from);
  return static_cast<std::uint8_t>(*from);
}

// Weights [Co, taps] of some taps as words of a lane's channels, [tap][lane].
template <int kChannels>
__device__ void stage(unsigned (&words)[kTaps * kMaxLanes], DepthwiseProblem const& d, int first_tap, int taps) {
  conv2d::Shape const& s = d.problem.shape;
  int const lanes = d.plan.lanes;
  for (int i = threadIdx.x; i < taps * lanes; i += kThreads) {
    int const n = (blockIdx.y * lanes + i % lanes) * kChannels, tap = first_tap + i / lanes;
    unsigned word = 0;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (n + c >= s.co) continue;
      std::int64_t const at = static_cast<std::int64_t>(n + c) * (s.kh * s.kw) + tap;
      word |= static_cast<unsigned>(static_cast<std::uint8_t>(d.problem.weight[at])) << 8 * c;
    }
    words[i] = word;
  }
}

template <class Out, int kChannels>
__device__ __forceinline__ void finish(int const (&sums)[kPixels][kChannels], DepthwiseProblem const& d,
                                       depthwise::ThreadPixels const& pixels) {
  conv2d::Shape const& s = d.problem.shape;
  Finish const& f = d.problem.finish;
  int const count = s.co - pixels.n;
  Channels<Out, kChannels> const channels(f, pixels.n, count);
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (pixels.p + i >= s.p) return;
    alignas(16) Out out[kChannels];
    bool const is_certain = channels.finish(out, sums[i]);
    if constexpr (std::is_same_v<Out, std::int8_t>) {
      if (!is_certain) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) out[c] = exact(f, min(pixels.n + c, s.co - 1), sums[i][c]);
      }
    }
    Out* const to = static_cast<Out*>(d.problem.out) + (pixels.first + i * s.q) * s.out_pixel + pixels.n;
    store(to, out, count, d.whole_runs);
  }
}

template <int kChannels>
__global__ __launch_bounds__(kThreads, 2) void depthwise_kernel(__grid_constant__ DepthwiseProblem const d) {
  __shared__ unsigned words[kTaps * kMaxLanes];
  Problem const& p = d.problem;
  conv2d::Shape const& s = p.shape;
  depthwise::ThreadPixels const pixels(s, d.plan);
  std::int8_t const* const x = p.x + pixels.window.at + pixels.n / d.plan.multiplier;
  pdl_trigger();
  pdl_wait();
  int sums[kPixels][kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    int const first = first_sum(p.finish, min(pixels.n + c, s.co - 1));
#pragma unroll
    for (int i = 0; i < kPixels; ++i) sums[i][c] = first;
  }
  int const all_taps = s.kh * s.kw;
  conv2d::Column tap{0, 0, 0};
#pragma unroll 1
  for (int first_tap = 0; first_tap < all_taps; first_tap += kTaps) {
    int const taps = min(kTaps, all_taps - first_tap);
    __syncthreads();  // the previous taps have been read
    stage<kChannels>(words, d, first_tap, taps);
    __syncthreads();
    if (!pixels.is_valid) continue;
#pragma unroll 1
    for (int t = 0; t < taps; ++t) {
      unsigned const weight = words[t * d.plan.lanes + pixels.lane];
      conv2d::Offset const offset(s, tap);
      conv2d::Window window = pixels.window;
#pragma unroll
      for (int i = 0; i < kPixels; ++i, window.y += s.stride_h) {
        unsigned const pixel =
            is_inside(s, window, offset) ? load<kChannels>(x + (offset.at + i * pixels.down)) : d.fill;
        // One byte of a product at a time: the other channels' weights are masked out.
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          sums[i][c] = __dp4a(static_cast<int>(pixel), static_cast<int>(weight & 0xffu << 8 * c), sums[i][c]);
        }
      }
      tap.advance(s, 1, {0, 1, 0});
    }
  }
  if (!pixels.is_valid) return;
  switch (p.out_dtype) {
    case DType::kInt8:
      return finish<std::int8_t>(sums, d, pixels);
    case DType::kFloat16:
      return finish<__half>(sums, d, pixels);
    case DType::kBFloat16:
      return finish<__nv_bfloat16>(sums, d, pixels);
    default:
      return finish<float>(sums, d, pixels);
  }
}

}  // namespace

void launch_depthwise(Problem const& problem, int channels, Stream stream) {
  auto const plan = depthwise::Plan::of(problem.shape, channels);
  DepthwiseProblem const d{problem, plan, fill_of(problem), has_whole_runs(problem, channels)};
  auto* const kernel = channels == 4 ? depthwise_kernel<4> : depthwise_kernel<1>;
  cuda_check(launch_pdl(kernel, plan.grid(problem.shape), kThreads, 0, stream, d), "launching epiloq.conv2d_int8");
}

}  // namespace epiloq::ops::conv2d_int8
