// What online_quant_mm says that its kernels take on SM90, with the numbers of costs.h as variables:
// online_quant_fit.py compiles this with a costs.h whose constants are none, and fits them.

#include <vector>

// All of it, as what is asked for is private there.
#include "dispatch/online_quant_mm/select.cpp"

namespace online = epiloq::ops::online_quant_mm;

namespace {

// In the order in which costs.h has them.
std::vector<double*> numbers() {
  std::vector<double*> all;
  for (auto& row : online::kMmaTimes) {
    all.insert(all.end(), {&row.work[0], &row.work[1], &row.wait[0], &row.wait[1], &row.end});
  }
  for (auto& step : online::kSm90Steps) all.insert(all.end(), {&step[0], &step[1]});
  auto& once = online::kSm90Time;
  all.insert(all.end(), {&once.mma_power, &once.power, &once.read_rate, &once.begin, &once.token, &once.sent_token,
                         &once.split, &once.last_wave});
  return all;
}

struct Candidate {
  epiloq::OnlineQuantProblem problem;
  epiloq::Target target;
  online::Choice choice;
};
std::vector<Candidate> candidates;

void add_candidates(int m, int n, int k, int bits, epiloq::Target const& t) {
  epiloq::OnlineQuantProblem const p{m, n, k, online::kSm90Group, bits};
  online::for_each_candidate(p, t, [&](online::Choice const& choice) { candidates.push_back({p, t, choice}); });
}
std::string words_of(Candidate const& c) { return online::describe(c.choice, c.problem); }
double microseconds_of(Candidate const& c) { return online::time_of(c.choice, c.problem, c.target) / 1000; }

}  // namespace

#include "times_library.h"
