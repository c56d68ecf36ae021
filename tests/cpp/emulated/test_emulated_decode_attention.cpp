// Decode attention on a CPU (emulated/machine.h): caches of 16 and 8 bits, masks, sinks, and the three ways to merge
// partial results, against softmax in double.

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "core/half.h"
#include "kernels/generic/attention/decode_attention.cuh"

using namespace epiloq;
using namespace epiloq::ops::decode_attention;

namespace {

enum class Merge { kAlone, kCluster, kWorkspace };

struct Sizes {
  int batches, key_heads, group, tokens, split;
  Merge merge;
  bool has_mask, has_sinks, is_dense;
};

double number_of(__half x) { return static_cast<float>(x); }
double number_of(__nv_bfloat16 x) { return static_cast<float>(x); }

// Keys, or values, [B, H, T, D], with a gap after each token unless dense.
template <class T, Kind kKind, int kWidth>
struct Cached {
  static constexpr int kBytes = kKind == Kind::kHalf ? 2 : 1, kGap = 16 / kBytes;
  Strides strides, of_scales;
  std::vector<std::uint8_t> data;
  std::vector<T> scales;

  Cached(Sizes const& sizes, std::mt19937& random) {
    std::int64_t const tokens = sizes.tokens, row = kWidth + (sizes.is_dense ? 0 : kGap);
    strides = {sizes.key_heads * tokens * row, tokens * row, row};
    of_scales = {sizes.key_heads * tokens, tokens, 1};
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < sizes.batches * strides.batch; ++i) {
      if constexpr (kKind == Kind::kHalf) {
        std::uint16_t const bits = T(normal(random)).bits;
        data.push_back(static_cast<std::uint8_t>(bits)), data.push_back(static_cast<std::uint8_t>(bits >> 8));
      } else {
        int const code = static_cast<int>(random() % 256);
        data.push_back(static_cast<std::uint8_t>(kKind == Kind::kFloat8 && code % 128 == 127 ? code - 1 : code));
      }
    }
    float const unit = kKind == Kind::kInt8 ? 1 / 64.F : 1 / 256.F;
    for (std::int64_t i = 0; kKind != Kind::kHalf && i < sizes.batches * of_scales.batch; ++i) {
      scales.push_back(T(unit * std::exp2(normal(random))));
    }
  }

  double operator()(int batch, int head, int token, int column) const {
    std::int64_t const at = batch * strides.batch + head * strides.head + token * strides.token + column;
    if constexpr (kKind == Kind::kHalf) {
      return number_of(T(static_cast<std::uint16_t>(data[2 * at] | data[2 * at + 1] << 8)));
    } else {
      double const scale = number_of(scales[batch * of_scales.batch + head * of_scales.head + token]);
      if (kKind == Kind::kInt8) return scale * static_cast<std::int8_t>(data[at]);
      return scale * number_of(__half(__nv_cvt_fp8x2_to_halfraw2(data[at], __NV_E4M3).x));
    }
  }

  // NaN, which nobody may read.
  void poison(int batch, int token, int key_heads) {
    for (int head = 0; head < key_heads; ++head) {
      std::int64_t const at = batch * strides.batch + head * strides.head + token * strides.token;
      std::fill_n(data.begin() + at * kBytes, kWidth * kBytes, std::uint8_t{0xff});
      if (!scales.empty()) scales[batch * of_scales.batch + head * of_scales.head + token] = T(NAN);
    }
  }
};

template <class T, Kind kKind, int kWidth>
void check(Sizes const& sizes, std::mt19937& random) {
  using A = Attention<T, kKind, kWidth>;
  std::normal_distribution<float> normal;
  int const heads = sizes.key_heads * sizes.group;
  Cached<T, kKind, kWidth> key(sizes, random), value(sizes, random);
  std::vector<T> query, sinks, out(sizes.batches * heads * kWidth, T(NAN));
  for (int i = 0; i < sizes.batches * heads * kWidth; ++i) query.push_back(T(normal(random)));
  for (int i = 0; i < heads; ++i) sinks.push_back(T(random() % 8 == 0 ? -INFINITY : 8 * normal(random)));
  std::vector<std::uint8_t> mask(sizes.batches * sizes.tokens, 1);
  double const share = sizes.has_mask ? static_cast<double>(random() % 3) / 2 : 1;
  for (int i = 0; i < sizes.batches * sizes.tokens; ++i) {
    mask[i] = std::uniform_real_distribution<>()(random) < share;
    if (mask[i] == 0) {
      key.poison(i / sizes.tokens, i % sizes.tokens, sizes.key_heads);
      value.poison(i / sizes.tokens, i % sizes.tokens, sizes.key_heads);
    }
  }
  std::vector<float> workspace(sizes.batches * heads * sizes.split * (kWidth + kStateFloats), NAN);

  Problem p{};
  p.query = query.data(), p.key = key.data.data(), p.value = value.data.data(), p.out = out.data();
  p.mask = sizes.has_mask ? mask.data() : nullptr, p.mask_batch = sizes.tokens;
  p.sinks = sizes.has_sinks ? sinks.data() : nullptr;
  p.key_scale = key.scales.data(), p.value_scale = value.scales.data();
  p.workspace = sizes.merge == Merge::kWorkspace ? workspace.data() : nullptr;
  p.of_query = {heads * kWidth, kWidth, 1}, p.of_key = key.strides, p.of_value = value.strides;
  p.of_key_scale = key.of_scales, p.of_value_scale = value.of_scales;
  p.batches = sizes.batches, p.key_heads = sizes.key_heads, p.tokens = sizes.tokens, p.width = kWidth;
  p.group = sizes.group, p.scale = 1.F / std::sqrt(static_cast<float>(kWidth));

  unsigned const split = sizes.split, parts = (sizes.group + kHeadsPerCta - 1) / kHeadsPerCta;
  unsigned const cluster = sizes.merge == Merge::kCluster ? split : 1, batches = sizes.batches;
  emulated::run({split, A::L::kThreads, cluster, sizeof(typename A::Shared), sizes.key_heads * parts, batches},
                [&] { attention_kernel<T, kKind, kWidth>(p); });
  if (sizes.merge == Merge::kWorkspace) {
    emulated::run({static_cast<unsigned>(heads), 32 * kMergeWarps, 1, sizeof(MergeShared<kWidth>), batches},
                  [&] { merge_kernel<T, kWidth>(p, sizes.split); });
  }

  for (int row = 0; row < sizes.batches * heads; ++row) {
    int const batch = row / heads, head = row % heads, key_head = head / sizes.group;
    double const sink = sizes.has_sinks ? number_of(sinks[head]) : -INFINITY;
    std::vector<double> scores(sizes.tokens, -INFINITY);
    double most = sink, sum = 0;
    for (int t = 0; t < sizes.tokens; ++t) {
      if (mask[batch * sizes.tokens + t] == 0) continue;
      double score = 0;
      for (int d = 0; d < kWidth; ++d) score += number_of(query[row * kWidth + d]) * key(batch, key_head, t, d);
      scores[t] = score * p.scale, most = std::max(most, scores[t]);
    }
    if (most > -INFINITY) sum = std::exp(sink - most);
    for (double& score : scores) sum += score = score == -INFINITY ? 0 : std::exp(score - most);
    for (int d = 0; d < kWidth; ++d) {
      double exact = 0, size = 0;
      for (int t = 0; t < sizes.tokens; ++t) {
        if (scores[t] == 0) continue;
        double const product = scores[t] / sum * value(batch, key_head, t, d);
        exact += product, size += std::abs(product);
      }
      // One rounding to T, whose numbers below the normal ones have a spacing of their own; fp32's sums; and exp2 of
      // scores that fp32 rounded.
      double const epsilon = std::is_same_v<T, __half> ? 0x1p-10 : 0x1p-7;
      double const smallest = std::is_same_v<T, __half> ? 0x1p-24 : 0x1p-133;
      double const found = number_of(out[row * kWidth + d]);
      CHECK(std::abs(found - exact) <= epsilon * size + 1e-5 * size + smallest);
    }
  }
}

template <class T, Kind kKind>
void check_kind(std::mt19937& random) {
  for (Merge merge : {Merge::kAlone, Merge::kCluster, Merge::kWorkspace}) {
    for (int mode = 0; mode < 4; ++mode) {
      auto const up_to = [&](int most) { return 1 + static_cast<int>(random() % most); };
      int const split = merge == Merge::kAlone ? 1 : 1 + up_to(2), tokens = up_to(160);
      Sizes const sizes{up_to(2), up_to(2),      up_to(11), tokens,           split,
                        merge,    mode % 2 == 1, mode >= 2, random() % 2 == 0};
      if (random() % 2 == 0) {
        check<T, kKind, 64>(sizes, random);
      } else {
        check<T, kKind, 128>(sizes, random);
      }
    }
  }
}

template <class T>
void check_type(std::mt19937& random) {
  check_kind<T, Kind::kHalf>(random);
  check_kind<T, Kind::kInt8>(random);
  check_kind<T, Kind::kFloat8>(random);
}

}  // namespace

int main() {
  auto random = test::generator();
  check_type<__half>(random);
  check_type<__nv_bfloat16>(random);
  return test::failures != 0;
}
