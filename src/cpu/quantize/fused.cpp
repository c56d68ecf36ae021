// Norms and gated activations on the CPU: each row is computed in fp32, and then rounded to x's dtype (rms_norm,
// silu_and_mul) or quantised as by quantize_int8 and quantize_fp8 (rms_norm_quant, silu_and_mul_quant).

#include "cpu/quantize/fused.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "core/threads.h"
#include "cpu/common/rows.h"
#include "problems/quantizers/quantize_fp8.h"
#include "problems/quantizers/quantize_int8.h"

namespace epiloq::ops {
namespace {

void quantize_row(QuantizedRows const& out, DType q, int row, float const* values) {
  std::uint8_t* const to = out.q + row * out.stride_q;
  float* const scale = out.scale + row * out.scale_row;
  if (q == DType::kInt8) {
    quantize_int8::Problem problem{};
    problem.rows = 1;
    problem.cols = out.cols;
    problem.padded_cols = out.padded_cols;
    problem.x = values;
    problem.q = reinterpret_cast<std::int8_t*>(to);
    problem.scale = scale;
    return quantize_int8::run_on_host(problem, DType::kFloat32);
  }
  quantize_fp8::Problem problem{};
  problem.rows = problem.tile_rows = 1;
  problem.cols = out.cols;
  problem.padded_cols = out.padded_cols;
  problem.tile_cols = out.tile_cols;
  problem.tiles = out.tiles;
  problem.scale_col = out.scale_col;
  problem.x = values;
  problem.q = to;
  problem.scale = scale;
  problem.rule = out.rule;
  quantize_fp8::run_on_host(problem, DType::kFloat32, q);
}

// In float64, several sums at a time, as compilers may not reorder additions.
EPILOQ_CLONES double sum_of_squares(float const* x, int count) {
  constexpr int kLanes = 16;
  double sums[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += static_cast<double>(x[i + lane]) * x[i + lane];
  }
  for (; i < count; ++i) sums[0] += static_cast<double>(x[i]) * x[i];
  double sum = 0;
  for (double const part : sums) sum += part;
  return sum;
}

EPILOQ_CLONES void add(float const* a, float const* b, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

EPILOQ_CLONES void normalize(float const* x, float inverse, float const* weight, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = x[i] * inverse * weight[i];
}

// exp(x) within 2 ulp: 2^n * exp(r), |r| <= ln(2) / 2, by the polynomial of Cephes' expf. Infinity above float32's
// range; exp(-87) below -87 and 1 for NaN, neither of which a sum with 1 or a product with NaN shows.
inline float exponential(float x) {
  constexpr float kLog2E = 1.44269504088896341f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  float const above = x > -87.f ? x : x == x ? -87.f : 0.f;
  float const bounded = above < 89.f ? above : 89.f;
  float const n = std::nearbyint(bounded * kLog2E), r = bounded - n * kLn2High - n * kLn2Low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  // In two factors: 2^128 alone is infinite.
  int const power = static_cast<int>(n), half = power >> 1;
  float const first = std::bit_cast<float>((half + 127) << 23);
  float const second = std::bit_cast<float>((power - half + 127) << 23);
  return (p * r * r + r + 1.f) * first * second;
}

// NaN fails every comparison, and so stays NaN.
EPILOQ_CLONES void apply(Gate const& gate, float const* gates, float const* factors, int count, float* out) {
  float const alpha = gate.alpha, limit = gate.limit, offset = gate.offset;
  for (int i = 0; i < count; ++i) {
    float const g = gates[i] > limit ? limit : gates[i], below = factors[i] > limit ? limit : factors[i];
    float const u = below < -limit ? -limit : below;
    out[i] = g / (1.f + exponential(-alpha * g)) * (u + offset);
  }
}

EPILOQ_CLONES void separate(float const* both, int count, float* even, float* odd) {
  for (int i = 0; i < count; ++i) even[i] = both[2 * i], odd[i] = both[2 * i + 1];
}

// Calls write(row, values) with each norm, of rows that are shared among threads.
template <class Write>
void norm_rows(NormInputs const& in, DType x, DType weight_dtype, int rows, int cols, int threads, Write const& write) {
  std::vector<float> widened;
  float const* const weight = as_float(in.weight, weight_dtype, 0, cols, widened);
  share(rows, threads, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> scratch, added, sum(in.residual != nullptr ? cols : 0), values(cols);
    for (int row = static_cast<int>(first); row < last; ++row) {
      float const* source = as_float(in.x, x, row * in.stride_x, cols, scratch);
      if (in.residual != nullptr) {
        add(source, as_float(in.residual, x, row * in.stride_residual, cols, added), cols, sum.data());
        write_row(sum.data(), cols, x, in.residual_out, row * in.stride_residual_out);
        source = as_float(in.residual_out, x, row * in.stride_residual_out, cols, scratch);  // rounded
      }
      float const mean = static_cast<float>(sum_of_squares(source, cols)) / static_cast<float>(std::max(cols, 1));
      normalize(source, 1.f / std::sqrt(mean + in.eps), weight, cols, values.data());
      write(row, values.data());
    }
  });
}

// Rows of x: `cols` gates, and as many factors.
struct GatedRows {
  void const* x;
  DType dtype;
  std::int64_t stride;
  int rows, cols;
  Gate gate;
  bool interleaved;
};

// The same of gated activations.
template <class Write>
void gate_rows(GatedRows const& in, int threads, Write const& write) {
  constexpr int kChunk = 4096;  // columns that stay in the cache
  int const cols = in.cols;
  share(in.rows, threads, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> scratch, gates(in.interleaved ? std::min(cols, kChunk) : 0), factors = gates, values(cols);
    for (int row = static_cast<int>(first); row < last; ++row) {
      std::int64_t const begin = row * in.stride;
      for (int c = 0; c < cols; c += kChunk) {
        int const count = std::min(cols - c, kChunk);
        if (in.interleaved) {
          float const* const both = as_float(in.x, in.dtype, begin + 2 * std::int64_t{c}, 2 * count, scratch);
          separate(both, count, gates.data(), factors.data());
          apply(in.gate, gates.data(), factors.data(), count, &values[c]);
        } else {
          apply(in.gate, as_float(in.x, in.dtype, begin + c, count, gates),
                as_float(in.x, in.dtype, begin + cols + c, count, factors), count, &values[c]);
        }
      }
      write(row, values.data());
    }
  });
}

}  // namespace

void rms_norm::run_on_host(Problem const& p, DType x, DType weight, int threads) {
  norm_rows(p.in, x, weight, p.rows, p.cols, threads,
            [&](int row, float const* values) { write_row(values, p.cols, x, p.out, row * p.stride_out); });
}

void rms_norm_quant::run_on_host(Problem const& p, DType x, DType q, int threads) {
  norm_rows(p.in, x, x, p.out.rows, p.out.cols, threads,
            [&](int row, float const* values) { quantize_row(p.out, q, row, values); });
}

void silu_and_mul::run_on_host(Problem const& p, DType x, int threads) {
  gate_rows({p.x, x, p.stride_x, p.rows, p.cols, p.gate, p.interleaved}, threads,
            [&](int row, float const* values) { write_row(values, p.cols, x, p.out, row * p.stride_out); });
}

void silu_and_mul_quant::run_on_host(Problem const& p, DType x, DType q, int threads) {
  gate_rows({p.x, x, p.stride_x, p.out.rows, p.out.cols, p.gate, false}, threads,
            [&](int row, float const* values) { quantize_row(p.out, q, row, values); });
}

}  // namespace epiloq::ops
