#include "ops/online_quant_mm/select.h"

#include <algorithm>
#include <sstream>

#include "epiloq/error.h"
#include "ops/online_quant_mm/configs.h"

namespace epiloq::ops::online_quant_mm {
namespace {

// The last rule takes any problem, and every tile is named by some rule.
constexpr bool complete() {
  if (kRules.back().m_max != kAny || kRules.back().n_max != kAny) return false;
  for (int tile = 0; tile < static_cast<int>(kTiles.size()); ++tile) {
    bool named = false;
    for (Rule const& rule : kRules) named |= rule.tile == tile;
    if (!named) return false;
  }
  return true;
}
static_assert(complete());

// Consumer cards of SM86 and SM89 give a block 99 KiB.
static_assert(kTiles[kRules.back().tile].shared_bytes(kGroups.front(), 8) <= 99 * 1024);

}  // namespace

bool has_fused_kernel(std::int64_t group_size, Target const& t) {
  return t.arch != Arch::kSm75 && std::ranges::count(kGroups, group_size) > 0;
}

int choose(OnlineQuantProblem const& p, Target const& t) {
  if (t.arch == Arch::kAuto) throw InvalidArgument("epiloq.online_quant_mm: arch: expected one architecture, got auto");
  if (!has_fused_kernel(p.group_size, t)) return kStaged;
  for (Rule const& rule : kRules) {
    bool const fits = kTiles[rule.tile].shared_bytes(static_cast<int>(p.group_size), p.bits) <= t.shared_bytes;
    if (p.m <= rule.m_max && p.n <= rule.n_max && fits) return rule.tile;
  }
  return kStaged;
}

std::string describe(int choice, OnlineQuantProblem const& p) {
  std::ostringstream text;
  if (choice == kStaged) {
    text << "staged: quantise, then a dp4a product and a pass over float32 sums for each block of " << p.group_size;
    return text.str();
  }
  gemm::BlockwiseConfig const& c = kTiles[choice];
  text << "sm80 mma.sync w" << p.bits << "a8 blocks of " << p.group_size << ' ' << c.tile_m() << 'x' << c.tile_n()
       << "x128 warp " << c.warp_m << 'x' << c.warp_n << " teams " << c.teams << " stages " << c.stages;
  return text.str();
}

Target nominal(Arch arch) {
  // T4, A100, H100
  constexpr Target kTargets[] = {{Arch::kSm75, 40, 65536}, {Arch::kSm80, 108, 166912}, {Arch::kSm90, 132, 232448}};
  for (Target const& target : kTargets) {
    if (target.arch == arch) return target;
  }
  throw InvalidArgument("epiloq.explain: arch: expected sm75, sm80 or sm90, got " + name(arch));
}

}  // namespace epiloq::ops::online_quant_mm
