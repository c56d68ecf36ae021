#include "ops/conv2d_weight_only/select.h"

#include <sstream>

#include "ops/conv2d/im2col.h"
#include "ops/conv2d_weight_only/configs.h"
#include "ops/weight_only_mm/layout.h"
#include "ops/weight_only_mm/select.h"

namespace epiloq::ops::conv2d_weight_only {
namespace {

namespace wo = weight_only_mm;

constexpr int kMaxGrid = 65535;
constexpr int kWindowBytes = 16;  // of a pixel, in shared memory

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Chunks of 8 channels start on 16 bytes.
bool has_chunks(Problem const& p) {
  conv2d::Shape const& s = p.shape;
  return reinterpret_cast<std::uintptr_t>(p.x) % 16 == 0 && s.x_image % 8 == 0 && s.x_row % 8 == 0 &&
         s.x_pixel % 8 == 0 && p.padded_channels % 8 == 0;
}

// The product with as many tokens as pixels.
WeightOnlyMmProblem product_of(Problem const& p, std::int64_t tokens) {
  wo::Weight const& w = p.weight;
  int const scale_bytes = size_of(w.scale_dtype), others = w.offset != nullptr ? scale_bytes : w.zero != nullptr;
  return {tokens, w.n, w.k, w.bits, w.group, p.dtype, has_chunks(p), scale_bytes + others};
}

Choice dense(char const* why) { return {Family::kDense, 0, 1, why}; }

}  // namespace

Choice choose(Problem const& p, Target const& t) {
  conv2d::Shape const& s = p.shape;
  if (!conv2d::fits(s)) return dense("an image of more than 2^28 lines or columns, or 2^31 elements apart");
  if (p.depthwise) return s.co <= kMaxGrid ? Choice{Family::kDepthwise} : dense("more than 65535 channels");
  if (s.groups > 1) return dense("groups of several channels");
  std::int64_t const pixels = conv2d::pixels(s);
  WeightOnlyMmProblem const product = product_of(p, pixels);
  // What weight_only_mm refuses of one token it refuses for the weight's or x's sake.
  wo::Choice const of_one = wo::choose(product_of(p, 1), t);
  if (of_one.family == wo::Family::kDense) return dense(of_one.why);
  if (pixels >= kDensePixels) return dense("many pixels");
  for (int row = 0; row < static_cast<int>(kRows.size()); ++row) {
    wo::TiledConfig const& c = kRows[row];
    if ((t.arch == Arch::kSm75) != (row == kSm75Row)) continue;
    if (wo::shared_bytes(c, product) + c.tokens * kWindowBytes > t.shared_bytes) continue;
    std::int64_t const blocks = ceil_div(pixels, c.tokens) * ceil_div(s.co, c.rows());
    int const split = wo::best_split(blocks, ceil_div(p.weight.k, wo::kPadding), 4, c.blocks, t);
    // A wide tile reads the weight less often, if the SMs have enough of them.
    bool const enough = blocks * kMaxCluster >= t.sm_count && pixels > c.tokens / 2;
    if (enough || row > 0) return {Family::kPatches, row, split};
  }
  return dense("no kernel fits the shared memory");
}

std::string describe(Choice const& choice) {
  std::ostringstream text;
  if (choice.family == Family::kDense) {
    text << "de-quantise, then a dense convolution (" << choice.why << ')';
    return text.str();
  }
  if (choice.family == Family::kDepthwise) return "depthwise, a column of pixels a thread";
  wo::TiledConfig const& c = kRows[choice.row];
  text << "implicit product, mma.sync " << c.rows() << " weight rows x " << c.tokens << " pixels, " << c.warps
       << " warps, stages " << c.stages4;
  if (choice.split > 1) text << ", K over clusters of " << choice.split;
  return text.str();
}

}  // namespace epiloq::ops::conv2d_weight_only
