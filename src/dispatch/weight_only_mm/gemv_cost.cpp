#include "dispatch/weight_only_mm/gemv_cost.h"

#include <algorithm>
#include <cmath>

#include "dispatch/weight_only_mm/costs.h"
#include "kernels/common/occupancy.h"
#include "kernels/common/w4a16/sizes.h"
#include "kernels/common/w4a16/split_k.h"

namespace epiloq::ops::weight_only_mm {
namespace {

// Blocks that an SM holds at a time; launches leave it no more than an even share.
int residents(int row, WeightOnlyMmProblem const& p, int split, std::int64_t blocks, Target const& t) {
  std::int64_t const own_bytes = stream_bytes(kStreamRows[row], p, split);
  bool const spreads = t.arch == Arch::kSm90;
  std::int64_t const bytes =
      spreads ? std::max<std::int64_t>(own_bytes, bytes_for_share(ceil_div(blocks, t.sm_count), t.shared_bytes))
              : own_bytes;
  std::int64_t const fit = (t.shared_bytes + kReservedOfBlock) / (bytes + kReservedOfBlock);
  return static_cast<int>(std::clamp<std::int64_t>(fit, 1, kStreamTimes[row].resident[p.bits == 8]));
}

}  // namespace

// Of a block: sums of others that share K, its warps' rings of stages, then their sums.
std::int64_t stream_bytes(StreamConfig const& c, WeightOnlyMmProblem const& p, int split) {
  int const rows = c.slabs_of(p.bits) * kSlab;
  int const received = stream_received_bytes(static_cast<int>(p.m), rows, split);
  return received + c.warps * std::max<std::int64_t>(c.stages * (stage_bytes(p, rows) + p.m * kPadding * 2) +
                                                         (c.digits ? p.m * kDigitBytes : 0),
                                                     c.tokens() * (rows + 4) * 4);
}

double stream_time(int row, WeightOnlyMmProblem const& p, int split, Target const& t) {
  StreamConfig const& c = kStreamRows[row];
  StreamTime const& time = kStreamTimes[row];
  StreamStep const& work = kStreamSteps[p.bits == 8][c.digits];
  int const slabs = c.slabs_of(p.bits), rows = slabs * kSlab;
  std::int64_t const all = ceil_div(p.n, rows);  // clusters
  int const resident = residents(row, p, split, all * split, t);
  double const m = static_cast<double>(p.m);
  double const steps = static_cast<double>(ceil_div(ceil_div(p.k, kPadding), split));
  double const step = work.step + slabs * (work.slab + work.slab_token * m) + work.token * m;
  double const waiting =
      std::ceil(steps / c.warps) * kStreamTime.latency * time.wait / (c.stages - 1 + kStreamTime.own);
  auto const wave = [&](std::int64_t clusters_now) {
    if (clusters_now == 0) return 0.0;
    std::int64_t const blocks = clusters_now * split;
    // Those of a cluster are put side by side even where SMs are free.
    std::int64_t const even = ceil_div(blocks, t.sm_count), beside_own = std::min(resident, split);
    std::int64_t const beside = std::min<std::int64_t>(resident, split > 1 ? std::max(even, beside_own) : even);
    double const multiplying = static_cast<double>(beside) * steps * step / 4 * time.work[p.bits == 8];
    double const reading = static_cast<double>(blocks) * steps * static_cast<double>(step_bytes(p, rows)) /
                           (kStreamTime.read_rate * memory_rate(t));
    auto const raised = [](double value) { return std::pow(value, kStreamTime.power); };
    double const adding = static_cast<double>(beside) * slabs * c.warps * kStreamTime.sum;
    return std::pow(raised(multiplying) + raised(waiting) + raised(reading), 1 / kStreamTime.power) + adding;
  };
  std::int64_t const seats = clusters(split, resident, t), full = all / seats, rest = all % seats;
  double const waves = std::max(1.0, static_cast<double>(all) / static_cast<double>(seats));
  double const sharing = split > 1 ? waves * (kStreamTime.cluster + kStreamTime.cluster_block * split) : 0;
  return static_cast<double>(full) * wave(seats) + wave(rest) + kStreamTime.kernel + sharing;
}

}  // namespace epiloq::ops::weight_only_mm
