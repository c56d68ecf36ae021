// Weight-only depthwise convolution, with one or more outputs per channel: one byte per code, dequantised once per
// thread and tap.

#include "core/cuda_check.h"
#include "kernels/common/device_code.cuh"
#include "kernels/conv2d/depthwise.cuh"
#include "kernels/launch/conv2d_weight_only.h"

namespace epiloq::ops::conv2d_weight_only {
namespace {

namespace depthwise = conv2d::depthwise;
using depthwise::kPixels, depthwise::kThreads;

struct DepthwiseProblem {
  Problem problem;
  depthwise::Plan plan;
};

__device__ __forceinline__ float read(void const* values, DType dtype, int i) {
  if (dtype == DType::kFloat16) return static_cast<float>(static_cast<__half const*>(values)[i]);
  if (dtype == DType::kBFloat16) return static_cast<float>(static_cast<__nv_bfloat16 const*>(values)[i]);
  return static_cast<float const*>(values)[i];
}

// kChannels neighbouring values, loaded or stored as a vector if there are several.
template <class T, int kChannels>
struct alignas(kChannels * sizeof(T) % 16 == 0 ? 16 : kChannels * sizeof(T)) Run {
  T values[kChannels];
};

template <class T, int kChannels>
__global__ __launch_bounds__(kThreads) void depthwise_kernel(__grid_constant__ DepthwiseProblem const d) {
  Problem const& p = d.problem;
  conv2d::Shape const& s = p.shape;
  weight_only_mm::Weight const& w = p.weight;
  depthwise::ThreadPixels const pixels(s, d.plan);
  pdl_trigger();
  pdl_wait();
  if (!pixels.is_valid) return;

  float scale[kChannels], shift[kChannels];  // W = scale q + shift, shift = -scale zero or the offset
  float zero[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    int const n = pixels.n + c;
    scale[c] = read(w.scale, w.scale_dtype, n);
    shift[c] = w.offset != nullptr ? read(w.offset, w.scale_dtype, n) : 0.f;
    zero[c] = w.offset != nullptr ? 0.f : w.zero != nullptr ? static_cast<float>(w.zero[n]) : 1 << (w.bits - 1);
  }
  auto const* const x = static_cast<T const*>(p.x) + pixels.window.at + pixels.n / d.plan.multiplier;
  float sums[kPixels][kChannels] = {};
  conv2d::Column tap{0, 0, 0};
#pragma unroll 1
  for (std::uint8_t const* q = w.q + pixels.n; tap.kh < s.kh; q += s.co, tap.advance(s, 1, {0, 1, 0})) {
    auto const codes = *reinterpret_cast<Run<std::uint8_t, kChannels> const*>(q);
    conv2d::Offset const offset(s, tap);
    float weight[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      weight[c] = fmaf(scale[c], static_cast<float>(codes.values[c]) - zero[c], shift[c]);
    }
    conv2d::Window window = pixels.window;
#pragma unroll
    for (int i = 0; i < kPixels; ++i, window.y += s.stride_h) {
      if (!is_inside(s, window, offset)) continue;
      auto const pixel = *reinterpret_cast<Run<T, kChannels> const*>(x + (offset.at + i * pixels.down));
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sums[i][c] = fmaf(static_cast<float>(pixel.values[c]), weight[c], sums[i][c]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (pixels.p + i >= s.p) return;
    Run<T, kChannels> out;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      float const bias = p.bias != nullptr ? static_cast<float>(static_cast<T const*>(p.bias)[pixels.n + c]) : 0.f;
      float const value = sums[i][c] + bias;
      out.values[c] = static_cast<T>(clamped(value, p.lo, p.hi));
    }
    std::int64_t const at = (pixels.first + i * s.q) * s.out_pixel + pixels.n;
    *reinterpret_cast<Run<T, kChannels>*>(static_cast<T*>(p.out) + at) = out;
  }
}

// Whether runs of kRun channels are aligned for vector loads everywhere.
constexpr int kRun = 4;
bool has_runs(Problem const& p) {
  conv2d::Shape const& s = p.shape;
  std::int64_t const bytes = kRun * size_of(p.dtype);
  auto const address = [](void const* pointer) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer));
  };
  bool const aligned = address(p.x) % bytes == 0 && address(p.out) % bytes == 0 && address(p.weight.q) % kRun == 0;
  return aligned && s.co == s.ci && s.ci % kRun == 0 && s.x_image % kRun == 0 && s.x_row % kRun == 0 &&
         s.x_pixel % kRun == 0 && s.out_pixel % kRun == 0;
}

template <class T, int kChannels>
void launch_typed(Problem const& problem, Stream stream) {
  DepthwiseProblem const d{problem, depthwise::Plan::of(problem.shape, kChannels)};
  cuda_check(launch_pdl(depthwise_kernel<T, kChannels>, d.plan.grid(problem.shape), kThreads, 0, stream, d),
             "launching epiloq.conv2d_weight_only");
}

template <class T>
void launch_typed(Problem const& problem, Stream stream) {
  has_runs(problem) ? launch_typed<T, kRun>(problem, stream) : launch_typed<T, 1>(problem, stream);
}

}  // namespace

void launch_depthwise(Problem const& problem, Stream stream) {
  switch (problem.dtype) {
    case DType::kFloat16:
      return launch_typed<__half>(problem, stream);
    case DType::kBFloat16:
      return launch_typed<__nv_bfloat16>(problem, stream);
    default:
      return launch_typed<float>(problem, stream);
  }
}

}  // namespace epiloq::ops::conv2d_weight_only
