// Library with the modelled times of online_quant_mm's kernels on SM90. online_quant_fit.py compiles it with a costs.h
// whose constants are variables, and fits them.

#include <vector>

// The source itself: the cost model is in its anonymous namespace.
#include "dispatch/online_quant_mm/select.cpp"
#include "epiloq/export.h"

namespace online = epiloq::ops::online_quant_mm;

namespace {

// The parameters in the order of costs.h.
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

}  // namespace

extern "C" {

EPILOQ_API int numbers_read(double* values) {
  auto const all = numbers();
  for (std::size_t i = 0; values != nullptr && i < all.size(); ++i) values[i] = *all[i];
  return static_cast<int>(all.size());
}
EPILOQ_API void numbers_write(double const* values) {
  for (double* number : numbers()) *number = *values++;
}

// Adds the candidates of a problem on an SM90 card; returns the number of all candidates added so far.
EPILOQ_API int problem_add(int m, int n, int k, int bits, int memory_gb_s) {
  epiloq::Target const target{epiloq::Arch::kSm90, epiloq::kSmsOfClusters, 232448, true, memory_gb_s};
  epiloq::OnlineQuantProblem const p{m, n, k, online::kSm90Group, bits};
  online::for_each_candidate(p, target,
                             [&](online::Choice const& choice) { candidates.push_back({p, target, choice}); });
  return static_cast<int>(candidates.size());
}
EPILOQ_API void candidate_name(int i, char* name, int bytes) {
  std::string const text = online::describe(candidates[i].choice, candidates[i].problem);
  name[text.copy(name, bytes - 1)] = '\0';
}
EPILOQ_API void times_of(double* microseconds) {
  for (Candidate const& c : candidates) *microseconds++ = online::time_of(c.choice, c.problem, c.target) / 1000;
}
}
