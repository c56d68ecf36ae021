// What weight_only_mm says that its kernels take on SM90, with the numbers of costs.h as variables:
// weight_only_fit.py compiles this with a costs.h whose constants are none, and fits them.

#include <vector>

// All of both, as what is asked for is private there.
#include "dispatch/weight_only_mm/gemv_cost.cpp"
#include "dispatch/weight_only_mm/select.cpp"

namespace wo = epiloq::ops::weight_only_mm;

namespace {

// In the order in which costs.h has them.
std::vector<double*> numbers() {
  std::vector<double*> all;
  for (auto& of_bits : wo::kGemvSteps) {
    for (auto& step : of_bits) all.insert(all.end(), {&step.step, &step.panel, &step.token, &step.panel_token});
  }
  for (auto& row : wo::kGemvTimes) all.insert(all.end(), {&row.work[0], &row.work[1], &row.wait});
  auto& of_streams = wo::kGemvTime;
  all.insert(all.end(), {&of_streams.latency, &of_streams.own, &of_streams.read_rate, &of_streams.power,
                         &of_streams.sum, &of_streams.kernel, &of_streams.cluster, &of_streams.cluster_block});
  auto const add = [&all](auto& rows) {
    for (auto& row : rows) all.insert(all.end(), {&row.of4.step, &row.of4.block, &row.of8.step, &row.of8.block});
  };
  add(wo::kWgmmaTimes);
  for (double& products : wo::kWgmmaProducts) all.push_back(&products);
  all.push_back(&wo::kLimitExponent);
  add(wo::kDecodeTimes);
  for (auto* sums : {&wo::kSentSums, &wo::kLentSums, &wo::kDecodeSums}) {
    all.insert(all.end(), {&sums->tile, &sums->sum, &sums->crowd});
  }
  return all;
}

struct Candidate {
  epiloq::WeightOnlyMmProblem problem;
  epiloq::Target target;
  wo::Choice choice;
};
std::vector<Candidate> candidates;

template <class Rows>
void add(wo::Family family, Rows const& rows, epiloq::WeightOnlyMmProblem const& p, epiloq::Target const& t) {
  for (int row = 0; row < static_cast<int>(rows.size()); ++row) {
    if (!wo::is_there(family, row, p, t) || !wo::suits(rows[row], p)) continue;
    for (int split = 1; split <= std::min<std::int64_t>(epiloq::ceil_div(p.k, wo::kPadding), epiloq::kMaxCluster);
         ++split) {
      if (wo::may_share(rows[row], p, split, t)) candidates.push_back({p, t, {family, row, split}});
    }
  }
}
void add_candidates(int m, int n, int k, int bits, epiloq::Target const& t) {
  epiloq::WeightOnlyMmProblem p;
  p.m = m, p.n = n, p.k = k, p.bits = bits, p.group_size = 128;
  add(wo::Family::kStream, wo::kGemvRows, p, t);
  add(wo::Family::kRing, wo::kDecodeRows, p, t);
  add(wo::Family::kWgmma, wo::kWgmmaRows, p, t);
}
std::string words_of(Candidate const& c) { return wo::describe(c.choice); }
double microseconds_of(Candidate const& c) {
  auto const& [family, row, split, why] = c.choice;
  if (family == wo::Family::kStream) return wo::time_of_row(wo::kGemvRows, row, c.problem, split, c.target);
  if (family == wo::Family::kWgmma) return wo::time_of_row(wo::kWgmmaRows, row, c.problem, split, c.target);
  return wo::time_of_row(wo::kDecodeRows, row, c.problem, split, c.target);
}

}  // namespace

#include "times_library.h"
