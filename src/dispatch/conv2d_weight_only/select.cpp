#include "dispatch/conv2d_weight_only/select.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/ceil_div.h"
#include "dispatch/conv2d_weight_only/costs.h"
#include "dispatch/conv2d_weight_only/tables.h"
#include "dispatch/w4a16_limits.h"
#include "epiloq/error.h"
#include "kernels/common/w4a16/sizes.h"
#include "kernels/conv2d/image_boxes.h"
#include "kernels/sm90/w4a16/w4a16_stage_layout.h"

namespace epiloq::ops::conv2d_weight_only {
namespace {

namespace wo = weight_only_mm;

constexpr int kMaxGrid = 65535;
constexpr int kWindowBytes = 16;  // per pixel, in shared memory

// Chunks of 8 channels start on 16 bytes.
bool has_chunks(Problem const& p) {
  conv2d::Shape const& s = p.shape;
  return reinterpret_cast<std::uintptr_t>(p.x) % 16 == 0 && s.x_image % 8 == 0 && s.x_row % 8 == 0 &&
         s.x_pixel % 8 == 0 && p.padded_channels % 8 == 0;
}

// The GEMM with output pixels as tokens.
WeightOnlyMmProblem product_of(Problem const& p) {
  wo::Weight const& w = p.weight;
  return {.m = conv2d::pixels(p.shape),
          .n = w.n,
          .k = w.k,
          .bits = w.bits,
          .group_size = w.group,
          .dtype = p.dtype,
          .aligned = has_chunks(p),
          .scale_bytes = static_cast<int>(size_of(w.scale_dtype)),
          .zero_bytes = w.zero != nullptr ? 1 : 0,
          .offsets = w.offset != nullptr};
}

std::int64_t steps_of(WeightOnlyMmProblem const& product) { return ceil_div(product.k, wo::kPadding); }

Choice dense(char const* why) { return {Family::kDense, 0, 1, why}; }

// Why neither table has a kernel; null if one may.
char const* why_dense(Problem const& p, WeightOnlyMmProblem const& product, Target const& t) {
  if (!conv2d::fits(p.shape)) return "an image of more than 2^28 lines or columns, or 2^31 elements apart";
  if (p.shape.groups > 1) return "groups of several channels";
  if (product.bits < 4) return "no kernel of convolutions reads 2 or 3 bits";
  return wo::why_dense(product, t);
}

// Half a K step lies within one tap, and TMA has a map of the image.
bool supports_wgmma(Problem const& p, Target const& t) {
  conv2d::Shape const& s = p.shape;
  bool const halves = s.kh * s.kw == 1 || p.padded_channels % wo::kColumns == 0;
  return t.has_wgmma && p.weight.offset == nullptr && halves && conv2d::image_map_of(s, kElementBytes);
}

bool is_available(Family family, int row, Problem const& p, WeightOnlyMmProblem const& product, Target const& t) {
  if (row < 0) return false;
  if (family == Family::kWgmma) {
    bool const is_row = row < static_cast<int>(kWgmmaRows.size());
    return is_row && supports_wgmma(p, t) && wo::fits(kWgmmaRows[row], product, t);
  }
  if (family != Family::kPatches || row >= static_cast<int>(kRows.size())) return false;
  wo::TiledConfig const& c = kRows[row];
  return (t.arch == Arch::kSm75) == (row == kSm75Row) &&
         wo::shared_bytes(c, product) + c.tokens * kWindowBytes <= t.shared_bytes;
}

double time_of_dense(WeightOnlyMmProblem const& p) {
  double const weights = static_cast<double>(p.n) * p.k;
  return kDenseTime.call + weights * (kDenseTime.weight + p.m * kDenseTime.product);
}

// Waves of CTAs, each with whole K steps.
double time_of(int row, WeightOnlyMmProblem const& p, int split, Target const& t) {
  wo::WgmmaConfig const& c = kWgmmaRows[row];
  TileTime const& time = kWgmmaTimes[row];
  std::int64_t const high = ceil_div(p.n, c.rows()), wide = ceil_div(p.m, c.tokens);
  std::int64_t const at_once = clusters_at_once(split, 1, t), waves = ceil_div(high * wide, at_once);
  // Weights of a step. Tiles of the same rows are neighbours: memory delivers them once.
  double const of_cta = c.rows() * wo::kPadding * p.bits / 8;
  double const of_all = static_cast<double>(std::min(high, ceil_div(at_once, wide)) * split) * of_cta;
  double const reading = std::max(of_all / (kReading.rate * wo::memory_rate(t)), of_cta / kReading.sm);
  double const exponent = std::max(1.0, static_cast<double>(c.tokens) / kReading.whole);
  double const step = std::pow(std::pow(time.step, exponent) + std::pow(reading, exponent), 1 / exponent);
  auto const steps = static_cast<double>(ceil_div(steps_of(p), split));
  return static_cast<double>(waves) * (steps * step + time.cta);
}

// The faster of the WGMMA kernels and a dense convolution.
Choice fastest(Problem const& p, WeightOnlyMmProblem const& product, Target const& t) {
  Choice best = dense("many pixels");
  double least = time_of_dense(product);
  for (int row = 0; row < static_cast<int>(kWgmmaRows.size()); ++row) {
    if (!is_available(Family::kWgmma, row, p, product, t)) continue;
    for (int split = 1; split <= most_split(steps_of(product), t); ++split) {
      double const time = time_of(row, product, split, t);
      if (time < least) best = {Family::kWgmma, row, split}, least = time;
    }
  }
  return best;
}

Choice patches_choice(Problem const& p, WeightOnlyMmProblem const& product, Target const& t) {
  if (product.m >= kDensePixels) return dense("many pixels");
  for (int row = 0; row < static_cast<int>(kRows.size()); ++row) {
    if (!is_available(Family::kPatches, row, p, product, t)) continue;
    wo::TiledConfig const& c = kRows[row];
    std::int64_t const blocks = ceil_div(product.m, c.tokens) * ceil_div(product.n, c.rows());
    int const split = wo::best_split(blocks, steps_of(product), c.blocks, t);
    // A wide tile reads the weight less often, if there are enough tiles for the SMs.
    bool const enough = blocks * kMaxCluster >= t.sm_count && product.m > c.tokens / 2;
    if (enough || row > 0) return {Family::kPatches, row, split};
  }
  return dense("no kernel fits the shared memory");
}

}  // namespace

Choice choose(Problem const& p, Target const& t) {
  if (p.depthwise && conv2d::fits(p.shape)) {
    return p.shape.co <= kMaxGrid ? Choice{Family::kDepthwise} : dense("more than 65535 channels");
  }
  WeightOnlyMmProblem const product = product_of(p);
  if (char const* why = why_dense(p, product, t)) return dense(why);
  return supports_wgmma(p, t) ? fastest(p, product, t) : patches_choice(p, product, t);
}

Choice choose(Problem const& p, Target const& t, Conv2dWeightOnlyKernel const& kernel) {
  WeightOnlyMmProblem const product = product_of(p);
  char const* why = p.depthwise ? "a depthwise convolution" : why_dense(p, product, t);
  if (why == nullptr && !is_available(kernel.family, kernel.row, p, product, t)) {
    why =
        "no such row, not built for this architecture, not made for this image or for offsets, or too large for its "
        "shared memory";
  }
  if (kernel.split < 1 || kernel.split > most_split(steps_of(product), t)) why = "no such split";
  if (why != nullptr)
    throw InvalidArgument(
        std::string("epiloq.conv2d_weight_only: kernel: expected one that fits, got one that does not: ") + why);
  return {kernel.family, kernel.row, kernel.split};
}

std::string describe(Choice const& choice) {
  std::ostringstream text;
  if (choice.family == Family::kDense) {
    text << "dequantise, then a dense convolution (" << choice.why << ')';
    return text.str();
  }
  if (choice.family == Family::kDepthwise) return "depthwise, a column of pixels per thread";
  text << "implicit product, ";
  if (choice.family == Family::kWgmma) {
    wo::WgmmaConfig const& c = kWgmmaRows[choice.row];
    text << "wgmma " << c.rows() << " weight rows x " << c.tokens << " pixels, " << c.warpgroups()
         << (c.warpgroups() > 1 ? " warpgroups" : " warpgroup")
         << (c.k_groups > 1 ? ", " + std::to_string(c.k_groups) + " along K" : "");
  } else {
    wo::TiledConfig const& c = kRows[choice.row];
    text << "mma.sync " << c.rows() << " weight rows x " << c.tokens << " pixels, " << c.warps << " warps, stages "
         << c.stages4;
  }
  if (choice.split > 1) text << ", K over clusters of " << choice.split;
  return text.str();
}

}  // namespace epiloq::ops::conv2d_weight_only
