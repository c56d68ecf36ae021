#include "dispatch/grouped_packed_mm/select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "core/ceil_div.h"
#include "core/checks.h"
#include "dispatch/wgmma_cycles.h"
#include "kernels/common/occupancy.h"
#include "kernels/common/w4a16/split_k.h"
#include "kernels/common/w4a16/stage_layout.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::grouped_packed_mm {
namespace {

using weight_only_mm::kPadding;
using weight_only_mm::Weight;

constexpr int kStepsPerCta = 4;                                 // minimum number of K steps per CTA with split-K
constexpr int kMostRows = std::numeric_limits<int>::max() / 2;  // that TMA addresses, of all experts
constexpr int kMemoryBoundTokens = 16;                          // tiles of at most as many are limited by memory

// Whether x's type represents each product of a code and its scale.
bool is_exact(Format format, DType x) { return format == Format::kNvfp4 || x == DType::kBFloat16; }

// Average number of rows of x per expert that has any; with masked_m the capacity per expert.
int typical_rows(Problem const& p) {
  if (p.masked || p.counts == nullptr) return p.product.m;
  return ceil_div(p.product.m, std::min(p.experts, p.product.m));
}

// Maximum number of token tiles: each expert's last tile may be partly filled.
int most_tiles(Problem const& p, int tokens) {
  int const m = p.product.m;
  if (p.masked) return p.experts * ceil_div(m, tokens);
  if (p.counts == nullptr) return ceil_div(m, tokens);
  return (m + std::min(p.experts, m) * (tokens - 1)) / tokens;
}

// Shared memory of a K step: a warp's panels with their scales and zero points; and tokens.
int panel_bytes(Weight const& w, Format format, int panels) {
  int const scale_bytes = is_fp4(format) ? 1 : static_cast<int>(size_of(w.scale_dtype));
  return weight_only_mm::StageLayout::of(w.bits, scale_bytes, w.zero != nullptr, panels, groups_of(format)).bytes;
}
int token_bytes(int tokens) { return tokens * kPadding * 2; }

bool fits(Problem const& p, Format format, Config const& c, Target const& target) {
  int const stages = bits_of(format) == 8 ? c.stages8 : c.stages4;
  constexpr int kWarpPanels = kTileRows / kWarps / weight_only_mm::kPanelRows;
  int const stage = kWarps * panel_bytes(p.product.weight, format, kWarpPanels) + token_bytes(c.tokens);
  int const sums = weight_only_mm::sum_bytes(kTileRows, c.tokens);
  return kExpertWorkBytes + std::max(stages * stage, sums) <= target.shared_bytes;
}

// Whether experts have a persistent kernel, whatever its types: few enough of them, without gaps between their rows of
// x, on SM90.
bool has_expert_tiles(Problem const& p, Target const& target) {
  bool const has_limits = p.experts <= kMostTabledExperts &&
                          std::int64_t{p.product.weight.n} * p.experts <= kMostRows &&
                          std::int64_t{p.product.m} * p.experts <= kMostRows;
  bool const has_one_stride = !p.masked || p.stride_x_expert == p.product.m * p.product.stride_x;
  return target.has_wgmma && p.counts != nullptr && has_limits && has_one_stride;
}

Choice experts_of(Problem const& p, Format format, int row) {
  return {format, row, most_tiles(p, expert_config(row, p.product.weight.bits).tokens), 1, Family::kExperts};
}
Choice expert_decode_of(Problem const& p, Format format, int row) {
  return {format, row, most_tiles(p, decode_config(row, format).tokens), 1, Family::kExpertDecode};
}

bool has_expert_gemv(Problem const& p, Target const& target) { return target.has_wgmma && p.counts != nullptr; }
Choice expert_gemv_of(Problem const& p, Format format, int row, int split) {
  return {format, row, most_tiles(p, weight_only_mm::kGemvTokens), split, Family::kExpertGemv};
}

// Tiles of `rows` weight rows of the experts that have tokens, if each token's expert is random and a tile holds all
// tokens of its expert.
double tiles_of_experts(Problem const& p, int rows) {
  double const with_tokens = p.masked ? p.experts : p.experts * (1 - std::pow(1 - 1. / p.experts, p.product.m));
  return with_tokens * ceil_div(p.product.weight.n, rows);
}

// The GEMV of experts whose CTAs are likely to be all resident at the same time: with the most warps of these. For more
// CTAs, whose K steps are few, the persistent kernels are faster.
std::optional<Choice> few_rows_of(Problem const& p, Format format, Target const& target) {
  if (p.product.m > weight_only_mm::kGemvTokens || !has_expert_gemv(p, target)) return std::nullopt;
  double const ctas = tiles_of_experts(p, kExpertGemvTileRows);
  int const stage = panel_bytes(p.product.weight, format, kExpertGemvPanels) + token_bytes(p.product.m);
  for (int row = 0; row < static_cast<int>(kExpertGemvRows.size()); ++row) {
    ExpertGemvConfig const& c = kExpertGemvRows[row];
    int const bytes = kExpertWorkBytes + c.warps * kExpertGemvStages * stage + kReservedPerCta;
    int const resident = std::min(c.blocks, (target.shared_bytes + kReservedPerCta) / bytes);
    if (ctas <= resident * target.sm_count) return expert_gemv_of(p, format, row, 1);
  }
  return std::nullopt;
}

// The persistent kernel for experts with few tokens each that takes the shortest time. None for many tokens, or where
// the smallest tiles leave SMs idle: a kernel that splits K is faster then.
std::optional<Choice> few_tokens_of(Problem const& p, DType x, Format format, Target const& target) {
  int const most = is_fp4(format) ? kMostFp4ExpertDecodeRows : kMostExpertDecodeRows;
  if (typical_rows(p) > most || !has_expert_decode(p, x, format, target)) return std::nullopt;
  if (tiles_of_experts(p, kExpertDecodeRows.back().config.rows()) < target.sm_count) return std::nullopt;
  auto const time = [&](int rows, int blocks, double wave) {
    return std::ceil(tiles_of_experts(p, rows) / (blocks * target.sm_count)) * wave;
  };
  Choice best{};
  double least = std::numeric_limits<double>::infinity();
  for (int row = 0; row < static_cast<int>(kExpertDecodeRows.size()); ++row) {
    auto const& [config, wave] = kExpertDecodeRows[row];
    double const own = time(config.rows(), config.blocks, wave);
    if (own < least) least = own, best = expert_decode_of(p, format, row);
  }
  bool const wgmma_is_faster = has_expert_wgmma(0, p, x, format, target) &&
                               time(expert_config(0, bits_of(format)).rows(), 1, kExpertWgmmaWave) < least;
  return wgmma_is_faster ? experts_of(p, format, 0) : best;
}

// The GEMV with the largest CTAs that are all resident at the same time; if there is none, the one with the smallest.
std::optional<Choice> gemv_of(Problem const& p, Format format, Target const& target) {
  if (!is_fp4(format) || p.counts != nullptr) return std::nullopt;
  Weight const& w = p.product.weight;
  int const steps = w.padded_k / kPadding;
  std::optional<Choice> last;
  for (int row = 0; row < static_cast<int>(kGemvRows.size()); ++row) {
    Fp4GemvConfig const& c = kGemvRows[row];
    bool const is_narrowest = p.product.m <= c.tokens() && p.product.m > c.tokens() - kGemvTile;
    if (!is_narrowest) continue;
    int const ctas = ceil_div(w.n, c.rows()), room = c.blocks * target.sm_count;
    // With split-K, each warp of a CTA has at least one K step.
    int const most = std::max(1, most_split(steps / c.warps, target));
    int const split = std::clamp(room / ctas, 1, most);
    int const stage = panel_bytes(w, format, c.panels) + token_bytes(p.product.m);
    int const bytes = weight_only_mm::gemv_received_bytes(p.product.m, c.rows(), split) + c.warps * c.stages * stage;
    if (bytes > target.shared_bytes) continue;
    last = Choice{format, row, 1, split, Family::kGemv};
    bool const are_resident = c.blocks * (bytes + kReservedPerCta) <= target.shared_bytes + kReservedPerCta;
    if (ctas <= room && are_resident) return last;
  }
  return last;
}

// About 2.4 instructions of the integer pipes per weight. If two warpgroups do both, conversions and products
// hardly overlap on an H200.
constexpr weight_only_mm::WgmmaRates kRates{.fma = 2048, .conversions = 64 / 2.4, .overlaps = false};

Choice wgmma_of(Problem const& p, Format format, Target const& target) {
  Weight const& w = p.product.weight;
  Choice best{format, 0, 1, 1, Family::kWgmma};
  double least = std::numeric_limits<double>::infinity();
  for (int row = 0; row < static_cast<int>(kWgmmaRows.size()); ++row) {
    int const most = most_split(w.padded_k / kPadding, target);
    for (int split = 1; split <= most; ++split) {
      double const time =
          weight_only_mm::wgmma_cycles(kWgmmaRows[row], kRates, split, p.product.m, w.n, w.padded_k, target).total;
      if (time >= least) continue;
      least = time;
      best.row = row, best.split = split;
    }
  }
  return best;
}

// Slices of K. Where reading weights takes most of the time, those for which the SM with the most CTAs has the fewest K
// steps, its CTAs' prologues and epilogues included; otherwise as many as let the device's CTAs all run at a time.
int split_of(Problem const& p, Config const& c, Target const& target) {
  if (!target.has_clusters()) return 1;
  int const experts = p.counts == nullptr || p.product.m == 0 ? 1 : std::min(p.experts, p.product.m);
  int const tiles = experts * ceil_div(typical_rows(p), c.tokens);
  int const ctas = tiles * ceil_div(p.product.weight.n, kTileRows);
  int const room = c.blocks * target.sm_count;
  int const steps = p.product.weight.padded_k / kPadding;
  if (c.tokens > kMemoryBoundTokens)
    return std::clamp(room / ctas, 1, std::max(1, most_split(steps / kStepsPerCta, target)));
  constexpr double kEndSteps = 0.5;  // a CTA's prologue and epilogue; fitted on an H200
  int best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int split = 1; split <= most_split(steps, target); ++split) {
    // CTAs that start as others end spread evenly.
    double const of_sm = split * ctas <= room ? ceil_div(split * ctas, target.sm_count)
                                              : static_cast<double>(split) * ctas / target.sm_count;
    double const longest = of_sm * (ceil_div(steps, split) + kEndSteps);
    if (longest < least) best = split, least = longest;
  }
  return best;
}

}  // namespace

std::optional<Format> format_of(Weight const& w, WeightFormat format) {
  if (format == WeightFormat::kMxfp4) return Format::kMxfp4;
  if (format == WeightFormat::kNvfp4) return Format::kNvfp4;
  if (w.offset != nullptr) return std::nullopt;
  bool const is_wide = w.group == kPadding << w.group_shift || w.group == w.padded_k;
  if (is_wide && w.bits == 4) return Format::kInt4Wide;
  if (is_wide && w.bits == 8) return Format::kInt8Wide;
  if (w.bits == 4 && w.group == 64) return Format::kInt4Of64;
  if (w.bits == 4 && w.group == 32) return Format::kInt4Of32;
  return std::nullopt;
}

bool has_wgmma(Problem const& p, DType x, Format format, Target const& target) {
  return is_fp4(format) && is_exact(format, x) && target.has_wgmma && p.counts == nullptr;
}

bool has_expert_wgmma(int row, Problem const& p, DType x, Format format, Target const& target) {
  bool const has_type =
      is_fp4(format) ? is_exact(format, x) : !kExpertRows[row].rounds || p.product.weight.scale_dtype == x;
  return has_type && has_expert_tiles(p, target);
}

bool has_expert_decode(Problem const& p, DType x, Format format, Target const& target) {
  return (is_fp4(format) || p.product.weight.scale_dtype == x) && has_expert_tiles(p, target);
}

Choice choose(Problem const& p, DType x, Format format, Target const& target) {
  // A fixed tile height and no split-K give a row the same bits at any M.
  constexpr int kAnyM = 1;
  if (p.batch_invariant) return {format, kAnyM, most_tiles(p, kRows[kAnyM].tokens), 1};
  if (std::optional<Choice> const gemv = gemv_of(p, format, target)) return *gemv;
  if (p.product.m >= kWgmmaFromRows && has_wgmma(p, x, format, target)) return wgmma_of(p, format, target);
  if (std::optional<Choice> const gemv = few_rows_of(p, format, target)) return *gemv;
  if (std::optional<Choice> const few = few_tokens_of(p, x, format, target)) return *few;
  for (int row = static_cast<int>(kExpertRows.size()) - 1; row >= 0; --row) {
    // Masked experts have room for many rows, but usually few.
    if (p.masked && kExpertRows[row].rounds) continue;
    int const from = is_fp4(format) ? kFp4ExpertRowsFrom[row] : kExpertRowsFrom[row];
    if (typical_rows(p) >= from && has_expert_wgmma(row, p, x, format, target)) return experts_of(p, format, row);
  }
  int const rows = typical_rows(p), last = static_cast<int>(kRows.size()) - 1;
  int row = 0;
  while (row < last && kRows[row].tokens < rows && fits(p, format, kRows[row + 1], target)) ++row;
  return {format, row, most_tiles(p, kRows[row].tokens), split_of(p, kRows[row], target)};
}

Choice choose(Problem const& p, DType x, Format format, Target const& target, GroupedPackedMmKernel const& kernel) {
  Checker const check("grouped_packed_mm", {});
  int const rows = static_cast<int>(kRows.size());
  int const of_experts = kernel.row - rows;
  if (of_experts >= 0 && of_experts < static_cast<int>(kExpertRows.size()) && kernel.split == 1 &&
      has_expert_wgmma(of_experts, p, x, format, target)) {
    return experts_of(p, format, of_experts);
  }
  int const of_decode = of_experts - static_cast<int>(kExpertRows.size());
  if (of_decode >= 0 && of_decode < static_cast<int>(kExpertDecodeRows.size()) && kernel.split == 1 &&
      has_expert_decode(p, x, format, target)) {
    return expert_decode_of(p, format, of_decode);
  }
  int const of_gemv = of_decode - static_cast<int>(kExpertDecodeRows.size());
  int const most = most_split(p.product.weight.padded_k / kPadding, target);
  if (of_gemv >= 0 && of_gemv < static_cast<int>(kExpertGemvRows.size()) && kernel.split >= 1 && kernel.split <= most &&
      has_expert_gemv(p, target)) {
    return expert_gemv_of(p, format, of_gemv, kernel.split);
  }
  if (kernel.row < 0 || kernel.row >= rows || !fits(p, format, kRows[kernel.row], target)) {
    check.fail("kernel", "expected a row below ", rows, " that fits shared memory, got ", kernel.row);
  }
  if (kernel.split < 1 || kernel.split > most) {
    check.fail("kernel", "expected 1 to ", most, " slices of K, got ", kernel.split);
  }
  return {format, kernel.row, most_tiles(p, kRows[kernel.row].tokens), kernel.split};
}

std::string describe(Choice const& choice) {
  std::ostringstream text;
  if (choice.family == Family::kWgmma) {
    weight_only_mm::WgmmaConfig const& c = kWgmmaRows[choice.row];
    text << "sm90 wgmma, FP4 converted in registers, " << c.rows() << " weight rows x " << c.tokens
         << " tokens, split-K " << choice.split;
    return text.str();
  }
  if (choice.family == Family::kExperts) {
    weight_only_mm::WgmmaConfig const c = expert_config(choice.row, bits_of(choice.format));
    text << "grouped sm90 wgmma, " << c.rows() << " weight rows x " << kExpertRows[choice.row].chunk << " to "
         << c.tokens << " tokens, " << choice.tiles << " tiles of tokens at most"
         << (c.rounds && !is_fp4(choice.format) ? ", weights rounded with their scales" : "");
    return text.str();
  }
  if (choice.family == Family::kExpertDecode) {
    weight_only_mm::DecodeConfig const c = decode_config(choice.row, choice.format);
    text << "grouped sm90 mma.sync, " << c.rows() << " weight rows x " << kDecodeChunk << " to " << c.tokens
         << " tokens, " << choice.tiles << " tiles of tokens at most";
    return text.str();
  }
  if (choice.family == Family::kExpertGemv) {
    text << "grouped GEMV, mma.sync, " << kExpertGemvTileRows << " weight rows x " << kExpertGemvRows[choice.row].warps
         << " warps, " << choice.tiles << " tiles of tokens at most, split-K " << choice.split;
    return text.str();
  }
  if (choice.family == Family::kGemv) {
    Fp4GemvConfig const& c = kGemvRows[choice.row];
    text << "GEMV, mma.sync, " << c.rows() << " weight rows x " << c.warps << " warps, split-K " << choice.split;
    return text.str();
  }
  text << "grouped mma.sync, " << kTileRows << " weight rows x " << kRows[choice.row].tokens << " tokens, "
       << choice.tiles << " tiles of tokens at most, split-K " << choice.split;
  return text.str();
}

}  // namespace epiloq::ops::grouped_packed_mm
