// The GEMV for experts with few tokens on a CPU (emulated/machine.h): the search for a CTA's expert, its weights,
// scales, zero points, biases and factors, K split over warps and clusters, against sums in double. What no expert has
// is NaN.

#include <cmath>
#include <numeric>
#include <vector>

#include "check.h"
#include "core/half.h"
#include "kernels/sm80/w4a16/expert_gemv.cuh"
#include "packed_values.h"

using namespace epiloq;
using namespace epiloq::ops;
using namespace epiloq::ops::grouped_packed_mm;

namespace {

std::uint16_t bits_of(__half, float value) { return float16_of_float(value); }
std::uint16_t bits_of(__nv_bfloat16, float value) { return bfloat16_of_float(value); }

struct Sizes {
  int experts, n, k, group, split;
  bool masked, has_zeros, has_bias, has_factor;
};

// Experts' stacked weights, as packed_layout.h defines them.
template <class T, Format kFormat>
struct Weights {
  static constexpr int kBits = bits_of(kFormat), kScaleBytes = is_fp4(kFormat) ? 1 : 2;
  Sizes sizes;
  int panels = sizes.n / wo::kPanelRows, padded_k = (sizes.k + wo::kPadding - 1) / wo::kPadding * wo::kPadding;
  int group = sizes.group < 0 ? padded_k : sizes.group, groups = padded_k / group;
  std::vector<std::uint8_t> q, zero, scale;

  Weights(std::mt19937& random, Sizes const& sizes_) : sizes(sizes_) {
    int const all_rows = sizes.experts * sizes.n;
    std::vector<int> const nvfp4 = wo::nvfp4_bytes();
    for (int i = 0; i < all_rows * padded_k * kBits / 8; ++i) q.push_back(static_cast<std::uint8_t>(random()));
    for (int i = 0; i < all_rows * groups; ++i) {
      if (sizes.has_zeros) zero.push_back(static_cast<std::uint8_t>(random() % (1 << kBits)));
      // A power of two from 2^-7 to 1; any scale of up to 448; or any number of the type from -1 to 1.
      std::uint16_t const any = bits_of(T{}, static_cast<float>(random() % 2001) / 1000.F - 1.F);
      int const bits = kFormat == Format::kMxfp4   ? 120 + static_cast<int>(random() % 8)
                       : kFormat == Format::kNvfp4 ? nvfp4[random() % nvfp4.size()]
                                                   : any;
      for (int byte = 0; byte < kScaleBytes; ++byte) scale.push_back(static_cast<std::uint8_t>(bits >> 8 * byte));
    }
  }

  wo::Weight packed() const {
    wo::Weight w{};
    w.n = sizes.n, w.k = sizes.k, w.padded_k = padded_k, w.bits = kBits, w.group = group, w.groups = groups;
    for (int columns = wo::kStep; columns < group; columns *= 2) ++w.group_shift;
    w.q = q.data(), w.scale = scale.data(), w.zero = zero.empty() ? nullptr : zero.data();
    w.scale_dtype = is_fp4(kFormat)             ? DType::kFloat8E4M3
                    : std::is_same_v<T, __half> ? DType::kFloat16
                                                : DType::kBFloat16;
    return w;
  }

  // The value of a code with the scale and the zero point at `p`.
  double value(int code, int p) const {
    if (is_fp4(kFormat)) return wo::e2m1(code) * wo::fp4_scale(groups_of(kFormat), scale[p]);
    double const unit = static_cast<float>(T(static_cast<std::uint16_t>(scale[2 * p] | scale[2 * p + 1] << 8)));
    return unit * (code - (zero.empty() ? 1 << (kBits - 1) : zero[p]));
  }

  // Rows of an expert, [n][padded k].
  std::vector<double> dense(int expert) const {
    std::vector<double> found(sizes.n * padded_k);
    std::uint8_t const* lane = &q[expert * sizes.n * padded_k * kBits / 8];
    for (int panel = 0; panel < panels; ++panel) {
      for (int tile = 0; tile < padded_k; tile += wo::depth(kBits)) {
        for (int l = 0; l < wo::kLanes; ++l, lane += wo::lane_bytes(kBits)) {
          for (int i = 0; i < wo::lane_values(kBits); ++i) {
            auto const at = wo::tile_coord_of(kBits, l, i);
            int const row = panel * wo::kPanelRows + at.row, k = tile + at.column;
            int const p = ((expert * panels + panel) * groups + k / group) * wo::kPanelRows + wo::parameter_of(at.row);
            found[row * padded_k + k] = value(wo::value_at(lane, kBits, i), p);
          }
        }
      }
    }
    return found;
  }
};

template <int kRow, class T, Format kFormat>
void check(std::mt19937& random, Sizes const& sizes, std::vector<int> const& rows) {
  constexpr int kGap = 8;
  using S = ExpertGemv<kRow, T, kFormat>;

  Weights<T, kFormat> const weights(random, sizes);
  int const all = std::accumulate(rows.begin(), rows.end(), 0);
  int const most = sizes.masked ? *std::max_element(rows.begin(), rows.end()) + 1 : all + 2;  // rows of x, of an expert
  int const stride = weights.padded_k + kGap, out_stride = sizes.n + kGap;
  int const x_rows = sizes.masked ? most * sizes.experts : most;
  std::vector<T> x(x_rows * stride, T(NAN)), out(x_rows * out_stride, T(NAN)), bias;
  std::vector<float> factor;
  std::vector<int> counts, first;  // of each expert's rows of x
  for (int e = 0, end = 0; e < sizes.experts; ++e) {
    first.push_back(sizes.masked ? e * most : end);
    end += rows[e];
    counts.push_back(sizes.masked ? rows[e] : end);
    for (int i = 0; i < rows[e] * sizes.k; ++i) {
      float const value = static_cast<float>(random() % 2001) / 1000.F - 1.F;
      x[(first[e] + i / sizes.k) * stride + i % sizes.k] = T(value);
    }
    if (sizes.has_factor) factor.push_back(static_cast<float>(1 + random() % 8) / 8);
    for (int i = 0; sizes.has_bias && i < sizes.n; ++i) bias.push_back(T(static_cast<float>(random() % 9) - 4));
  }

  grouped_packed_mm::Problem p{};
  p.product.weight = weights.packed();
  p.product.m = most, p.product.stride_x = stride, p.product.stride_out = out_stride;
  p.product.x = x.data(), p.product.out = out.data(), p.product.bias = bias.empty() ? nullptr : bias.data();
  p.product.lo = -INFINITY, p.product.hi = INFINITY;
  p.experts = sizes.experts, p.counts = counts.data(), p.masked = sizes.masked;
  p.stride_x_expert = most * stride, p.stride_out_expert = most * out_stride;
  p.factor = factor.empty() ? nullptr : factor.data();

  int tiles = 1;  // and one that no expert has
  for (int count : rows) tiles += (count + S::kTokens - 1) / S::kTokens;
  int const split = sizes.split, row_tiles = (sizes.n + S::kRows - 1) / S::kRows;
  auto const pipeline =
      wo::gemv_pipeline<S, groups_of(kFormat)>(p.product.weight, std::min(most, S::kTokens), split, p.factor);
  int const bytes = kExpertWorkBytes + pipeline.received + std::max(S::kWarps * pipeline.warp_bytes(), S::kSumBytes);
  emulated::Launch launch{static_cast<unsigned>(tiles * row_tiles), S::kThreads, static_cast<unsigned>(split),
                          static_cast<std::size_t>(bytes), static_cast<unsigned>(split)};
  launch.clusters_along_y = true;
  emulated::run(launch, [&] { expert_gemv_kernel<S, T>(p, pipeline); });

  double const epsilon = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
  std::vector<bool> written(out.size());
  for (int e = 0; e < sizes.experts; ++e) {
    if (rows[e] == 0) continue;
    std::vector<double> const w = weights.dense(e);
    for (int i = 0; i < rows[e] * sizes.n; ++i) {
      int const token = first[e] + i / sizes.n, row = i % sizes.n;
      double exact = 0, size = 0;
      for (int k = 0; k < sizes.k; ++k) {
        double const product = w[row * weights.padded_k + k] * static_cast<float>(x[token * stride + k]);
        exact += product, size += std::abs(product);
      }
      double const times = sizes.has_factor ? factor[e] : 1;
      double const added = sizes.has_bias ? static_cast<float>(bias[e * sizes.n + row]) : 0;
      exact = exact * times + added, size = size * times + std::abs(added);
      double const found = static_cast<float>(out[token * out_stride + row]);
      written[token * out_stride + row] = true;
      // The result is rounded once; fp32 sums are rounded for each instruction and scale group.
      CHECK(std::abs(found - exact) <= epsilon * std::abs(exact) + size * std::ldexp(weights.padded_k / 16 + 16, -23));
    }
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (!written[i]) CHECK(std::isnan(static_cast<float>(out[i])));
  }
}

// Three experts, and more than a warp has lanes; one of them has more tokens than a tile.
template <int kRow, class T, Format kFormat>
void check_format(std::mt19937& random) {
  constexpr int kGroup = wo::kStep / groups_of(kFormat);
  auto const coin = [&] { return random() % 2 == 0; };
  for (int experts : {3, 40}) {
    bool const is_wide = groups_of(kFormat) == 1 && coin();
    int const n = experts == 3 ? 48 : 16, k = coin() ? 384 : 1032, split = 1 + static_cast<int>(random() % 3);
    bool const has_zeros = !is_fp4(kFormat) && coin();
    Sizes const sizes{experts, n, k, is_wide ? -1 : kGroup, split, coin(), has_zeros, coin(), coin()};
    std::vector<int> rows(experts);
    for (int& count : rows) count = random() % (experts == 3 ? 2 : 8) == 0 ? 1 + random() % 3 : 0;
    rows[random() % experts] = coin() ? 0 : 11;
    check<kRow, T, kFormat>(random, sizes, rows);
  }
}

template <int kRow, class T>
void check_row(std::mt19937& random) {
  check_format<kRow, T, Format::kInt4Wide>(random);
  check_format<kRow, T, Format::kInt4Of64>(random);
  check_format<kRow, T, Format::kInt4Of32>(random);
  check_format<kRow, T, Format::kInt8Wide>(random);
  check_format<kRow, T, Format::kMxfp4>(random);
  check_format<kRow, T, Format::kNvfp4>(random);
}

template <class T>
void check_type(std::mt19937& random) {
  check_row<0, T>(random);
  check_row<1, T>(random);
}

}  // namespace

int main() {
  auto random = test::generator();
  check_type<__half>(random);
  check_type<__nv_bfloat16>(random);
  return test::failures != 0;
}
