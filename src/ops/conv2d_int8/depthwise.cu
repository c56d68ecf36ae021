// int8 convolution of each channel by itself, or by several kernels of its own. Reading x is all the time there is: a
// thread makes a column of output pixels of up to four neighbouring channels, so that rows come from L1 from their
// second tap on.

#include <algorithm>

#include "core/cuda_check.h"
#include "ops/conv2d/im2col.h"
#include "ops/conv2d_int8/finish.cuh"
#include "ops/conv2d_int8/rows.h"
#include "ops/conv2d_int8/select.h"

namespace epiloq::ops::conv2d_int8 {
namespace {

constexpr int kThreads = 256;
constexpr int kPixels = 4;   // below each other, a thread
constexpr int kMaxLanes = 32;  // threads side by side in the channels, a block
constexpr int kTaps = 64;    // whose weights are in shared memory at a time

struct DepthwiseProblem {
  Problem problem;
  int multiplier;  // output channels of an input channel
  int lanes;
  bool whole_runs;
};

// kChannels neighbouring bytes as those of a word.
template <int kChannels>
__device__ __forceinline__ unsigned load(std::int8_t const* from) {
  if constexpr (kChannels == 4) return *reinterpret_cast<unsigned const*>(from);
  return static_cast<std::uint8_t>(*from);
}

template <int kChannels>
struct Depthwise {
  using Sums = int[kPixels][kChannels];

  // Weights [Co, taps] of kTaps taps to words of a lane's channels, [tap][lane].
  static __device__ void stage(unsigned (&words)[kTaps * kMaxLanes], DepthwiseProblem const& d, int first_tap,
                               int taps) {
    conv2d::Shape const& s = d.problem.shape;
    for (int i = threadIdx.x; i < taps * d.lanes; i += kThreads) {
      int const n = (blockIdx.y * d.lanes + i % d.lanes) * kChannels, tap = first_tap + i / d.lanes;
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

  // A product of one byte of a word by itself: the weights of the other channels are masked out.
  static __device__ __forceinline__ void add(int (&sums)[kChannels], unsigned x, unsigned weight) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      sums[c] = __dp4a(static_cast<int>(x), static_cast<int>(weight & 0xffu << 8 * c), sums[c]);
    }
  }

  template <class Out>
  static __device__ __forceinline__ void finish(Sums const& sums, DepthwiseProblem const& d, int image, int p, int q,
                                                int n) {
    conv2d::Shape const& s = d.problem.shape;
    Finish const& f = d.problem.finish;
    int const count = s.co - n;
    Channels<Out, kChannels> const channels(f, n, count);
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      if (p + i >= s.p) return;
      std::int64_t const pixel = (static_cast<std::int64_t>(image) * s.p + p + i) * s.q + q;
      Out* const to = static_cast<Out*>(d.problem.out) + pixel * s.out_pixel + n;
      alignas(16) Out out[kChannels];
      bool const is_right = channels.finish(out, sums[i]);
      if constexpr (std::is_same_v<Out, std::int8_t>) {
        if (!is_right) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) out[c] = exact(f, n + c, sums[i][c]);
        }
      }
      store(to, out, count, d.whole_runs);
    }
  }
};

// Blocks along x take columns of pixels, along y channels.
template <int kChannels>
__global__ __launch_bounds__(kThreads) void depthwise_kernel(__grid_constant__ DepthwiseProblem const d) {
  __shared__ unsigned words[kTaps * kMaxLanes];
  using D = Depthwise<kChannels>;
  Problem const& p = d.problem;
  conv2d::Shape const& s = p.shape;
  int const lane = threadIdx.x % d.lanes, columns = kThreads / d.lanes;
  int const n = (blockIdx.y * d.lanes + lane) * kChannels;
  unsigned const column = blockIdx.x * columns + threadIdx.x / d.lanes, line = column / s.q;
  unsigned const steps = (s.p + kPixels - 1) / kPixels;
  int const q = column % s.q, first_p = line % steps * kPixels, image = line / steps;
  bool const is_there = threadIdx.x / d.lanes < columns && image < s.batch && n < s.co;
  conv2d::Window const window = window_of(s, image, first_p, q);
  std::int8_t const* const x = p.x + window.at + n / d.multiplier;
  std::int64_t const down = s.stride_h * s.x_row;
  unsigned const fill = static_cast<std::uint8_t>(p.input_zero) * 0x01010101u;

  let_next_kernel_start();
  wait_for_previous_kernel();
  typename D::Sums sums;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    int const first = first_sum(p.finish, min(n + c, s.co - 1));
#pragma unroll
    for (int i = 0; i < kPixels; ++i) sums[i][c] = first;
  }
  int const all_taps = s.kh * s.kw;
  conv2d::Column tap{0, 0, 0};
#pragma unroll 1
  for (int first_tap = 0; first_tap < all_taps; first_tap += kTaps) {
    int const taps = min(kTaps, all_taps - first_tap);
    __syncthreads();
    D::stage(words, d, first_tap, taps);
    __syncthreads();
    if (!is_there) continue;
#pragma unroll 1
    for (int t = 0; t < taps; ++t) {
      unsigned const weight = words[t * d.lanes + lane];
      conv2d::Offset const offset(s, tap);
      conv2d::Window here = window;
#pragma unroll
      for (int i = 0; i < kPixels; ++i, here.y += s.stride_h) {
        unsigned const pixel =
            is_inside(s, here, offset) ? load<kChannels>(x + (offset.at + i * down)) : fill;
        D::add(sums[i], pixel, weight);
      }
      tap.advance(s, 1, {0, 1, 0});
    }
  }
  if (!is_there) return;
  switch (p.out_dtype) {
    case DType::kInt8:
      return D::template finish<std::int8_t>(sums, d, image, first_p, q, n);
    case DType::kFloat16:
      return D::template finish<__half>(sums, d, image, first_p, q, n);
    case DType::kBFloat16:
      return D::template finish<__nv_bfloat16>(sums, d, image, first_p, q, n);
    default:
      return D::template finish<float>(sums, d, image, first_p, q, n);
  }
}

}  // namespace

void launch_depthwise(Problem const& problem, int channels, Stream stream) {
  conv2d::Shape const& s = problem.shape;
  int const words = (s.co + channels - 1) / channels, lanes = std::min(words, kMaxLanes);
  DepthwiseProblem const d{problem, s.co / s.ci, lanes, has_whole_runs(problem, channels)};
  std::int64_t const columns = static_cast<std::int64_t>(s.batch) * ((s.p + kPixels - 1) / kPixels) * s.q;
  int const each = kThreads / lanes;
  dim3 const grid(static_cast<unsigned>((columns + each - 1) / each), (words + lanes - 1) / lanes);
  auto* const kernel = channels == 4 ? depthwise_kernel<4> : depthwise_kernel<1>;
  cuda_check(launch_dependent(kernel, grid, kThreads, 0, stream, d), "launching epiloq.conv2d_int8");
}

}  // namespace epiloq::ops::conv2d_int8
