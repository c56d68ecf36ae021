#include "dispatch/weight_only_mm/candidates.h"

#include <algorithm>

#include "dispatch/w4a16_limits.h"
#include "kernels/common/w4a16/sizes.h"
#include "kernels/common/w4a16/split_k.h"

namespace epiloq::ops::weight_only_mm {
namespace {

bool fits(GemvConfig const& c, WeightOnlyMmProblem const& p, Target const& t) {
  return p.m <= c.tokens() && gemv_bytes(c, p, 1) <= t.shared_bytes;
}

// Whether a row of the family's table is compiled for this target and number of bits.
bool is_built(Family family, int row, int bits, Target const& t) {
  if (family == Family::kDecode || family == Family::kWgmma) return t.has_wgmma;
  std::size_t const rows = family == Family::kGemv ? kGemvRows.size() : kTiledRows.size();
  if (bits < 4 && !(family == Family::kGemv ? is_narrow_gemv(row) : is_narrow_tiled(row))) return false;
  return t.arch != Arch::kSm75 || row + 1 == static_cast<int>(rows);
}

template <class Rows>
bool row_is_available(Rows const& rows, Family family, int row, WeightOnlyMmProblem const& p, Target const& t) {
  return row >= 0 && row < static_cast<int>(rows.size()) && is_built(family, row, p.bits, t) && fits(rows[row], p, t);
}

// No tile of twice as many tokens as there are, or more, was ever the fastest.
bool suits(WgmmaConfig const& c, WeightOnlyMmProblem const& p) {
  return c.tokens < 2 * p.m && c.tokens >= std::min<std::int64_t>((p.m + 1) / 2, kWideTokens) &&
         (!c.rounds || p.m > kExactTokens);
}
// One or two tokens always use the GEMV.
bool suits(DecodeConfig const& c, WeightOnlyMmProblem const& p) {
  return p.m > kIntegerTokens && (c.tokens == kDecodeRows.front().tokens || c.tokens < 2 * p.m);
}
bool suits(GemvConfig const&, WeightOnlyMmProblem const&) { return true; }
bool suits(TiledConfig const& c, WeightOnlyMmProblem const& p) {
  return c.tokens < 2 * std::max<std::int64_t>(p.m, kGemvTokens + 1);
}

template <class Rows>
void add(std::vector<Choice>& all, Family family, Rows const& rows, WeightOnlyMmProblem const& p, Target const& t) {
  int const most = most_split(ceil_div(p.k, kPadding), t);
  for (int row = 0; row < static_cast<int>(rows.size()); ++row) {
    if (!weight_only_mm::is_available(family, row, p, t) || !suits(rows[row], p)) continue;
    for (int split = 1; split <= most; ++split) {
      if (may_split(family, row, split, p, t)) all.push_back({family, row, split});
    }
  }
}

}  // namespace

bool has_sm90_kernels(WeightOnlyMmProblem const& p, Target const& t) {
  return t.has_wgmma && !p.offsets && p.bits >= 4;
}

bool is_available(Family family, int row, WeightOnlyMmProblem const& p, Target const& t) {
  switch (family) {
    case Family::kGemv:
      return row_is_available(kGemvRows, family, row, p, t);
    case Family::kTiled:
      return row_is_available(kTiledRows, family, row, p, t);
    case Family::kDecode:
      return has_sm90_kernels(p, t) && row_is_available(kDecodeRows, family, row, p, t);
    case Family::kWgmma:
      return has_sm90_kernels(p, t) && row_is_available(kWgmmaRows, family, row, p, t) &&
             (p.same_type || !kWgmmaRows[row].rounds);
    default:
      return false;
  }
}

// Whether a GEMV's shared memory holds the sums of split-K, too; a tile's always does.
bool may_split(Family family, int row, int split, WeightOnlyMmProblem const& p, Target const& t) {
  return family != Family::kGemv || gemv_bytes(kGemvRows[row], p, split) <= t.shared_bytes;
}

std::vector<Choice> kernels_of(WeightOnlyMmProblem const& p, Target const& t) {
  std::vector<Choice> all;
  add(all, Family::kGemv, kGemvRows, p, t);
  if (has_sm90_kernels(p, t)) {
    add(all, Family::kDecode, kDecodeRows, p, t);
    add(all, Family::kWgmma, kWgmmaRows, p, t);
  } else {
    add(all, Family::kTiled, kTiledRows, p, t);
  }
  return all;
}

// Receive slots for other CTAs' sums, then the warps' pipelines, which their sums overwrite.
std::int64_t gemv_bytes(GemvConfig const& c, WeightOnlyMmProblem const& p, int split) {
  int const rows = c.panels_of(p.bits) * kPanelRows;
  int const received = gemv_received_bytes(static_cast<int>(p.m), rows, split);
  std::int64_t const stage = stage_bytes(p, rows) + p.m * kPadding * 2;
  std::int64_t const pipeline = c.stages * stage + (c.integer ? p.m * kIntegerBytes : 0);
  return received + c.warps * std::max<std::int64_t>(pipeline, sum_bytes(rows, c.tokens()));
}

}  // namespace epiloq::ops::weight_only_mm
