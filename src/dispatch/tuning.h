#pragma once

// Kernel choice with measurements: a forced candidate, then a tuned one, then the operation's own choice.
//
// An operation describes itself by a Selection:
//   Problem, Choice
//   kName                                   of the operation
//   key(Problem) -> string                  the problems that share a tuned choice
//   candidates(Problem, Target) -> vector<Timed<Choice>>; empty: there is nothing to choose
//   choose(Problem, Target) -> Choice       by rules or the cost model
// and, for explain_terms,
//   terms(Choice, Problem, Target) -> string         the cost model's terms, in lines indented by two spaces
//   rank(Timed<Choice>, Problem, Target) -> double   what the cost model minimises, in us; infinite: not by default.
//                                                    Without it, the expected time.
// Next to Choice is describe(Choice) or describe(Choice, Problem) -> string, unique among candidates.

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/target.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/error.h"
#include "epiloq/tensor.h"
#include "epiloq/tuning.h"

namespace epiloq::tuning {

// A choice and the time that the cost model expects, in microseconds; 0: it has no opinion.
template <class Choice>
struct Timed {
  Choice choice;
  double us = 0;
};

template <class Choice>
struct Chosen {
  Choice choice;
  bool tuned = false;
};

std::string const& forced_kernel();
std::optional<std::string> tuned_kernel(int device, std::string const& key);
// Grows whenever tuned choices change.
std::uint64_t epoch();

inline int index_of(Device device) { return device.type == Device::Type::kCuda ? device.index : kNoDevice; }

// Values of M that share a tuned choice, as tiles compute them in the same time: each M up to 8, then multiples of 8
// and of 16, and above 256 multiples of the largest CTA tile, 128 tokens. CUTLASS tiles load partial boxes slowly, so
// multiples themselves do not share one with other M.
struct Tokens {
  std::int64_t bucket;
  bool whole;
};
Tokens tokens_of(std::int64_t m);
std::string key_of(char const* operation, std::int64_t m, std::int64_t n, std::int64_t k);

// A problem that does not come from a call, with the thread's setting of batch invariance. The choice reads the problem
// alone.
template <class Problem>
Problem as_set(Problem problem) {
  problem.batch_invariant |= batch_invariant();
  return problem;
}

template <class Choice, class Problem>
std::string name_of(Choice const& choice, Problem const& problem) {
  if constexpr (requires { describe(choice); })
    return describe(choice);
  else
    return describe(choice, problem);
}

template <class Selection>
std::optional<typename Selection::Choice> find(std::string const& name, typename Selection::Problem const& problem,
                                               Target const& target) {
  for (auto const& candidate : Selection::candidates(problem, target)) {
    if (name_of(candidate.choice, problem) == name) return candidate.choice;
  }
  return std::nullopt;
}

template <class Selection>
Chosen<typename Selection::Choice> choose(typename Selection::Problem const& problem, Target const& target,
                                          int device) {
  if (std::string const& forced = forced_kernel(); !forced.empty()) {
    if (auto const choice = find<Selection>(forced, problem, target)) return {*choice};
    throw InvalidArgument(std::string("epiloq.") + Selection::kName +
                          ": kernel: expected one of this problem's candidates, got " + forced);
  }
  // With batch invariance all M keep to one order of sums.
  auto const name = problem.batch_invariant ? std::nullopt : tuned_kernel(device, Selection::key(problem));
  if (name) {
    if (auto const choice = find<Selection>(*name, problem, target)) return {*choice, true};
  }
  return {Selection::choose(problem, target)};
}

// The chosen kernel and the runner-up, each with the terms of the cost model. `note`: a line about the choice.
template <class Selection>
std::string explain_terms(typename Selection::Problem const& problem, Target const& target,
                          Chosen<typename Selection::Choice> const& chosen, std::string const& note = "") {
  std::string const name = name_of(chosen.choice, problem);
  std::string text = "chosen: " + name + '\n' + Selection::terms(chosen.choice, problem, target);
  text += chosen.tuned ? "  chosen as measured on this card by epiloq.tune\n" : note;
  std::optional<typename Selection::Choice> next;
  double least = std::numeric_limits<double>::infinity();
  for (auto const& candidate : Selection::candidates(problem, target)) {
    if (candidate.us == 0 || name_of(candidate.choice, problem) == name) continue;
    double us = candidate.us;
    if constexpr (requires { &Selection::rank; }) us = Selection::rank(candidate, problem, target);
    if (us < least) least = us, next = candidate.choice;
  }
  if (next) {
    text += "runner-up: " + name_of(*next, problem) + '\n' + Selection::terms(*next, problem, target);
  }
  text.pop_back();  // the last line's end
  return text;
}

template <class Selection>
std::string explain(typename Selection::Problem const& problem, Target const& target, int device, bool terms = false) {
  auto const chosen = choose<Selection>(problem, target, device);
  if constexpr (requires { &Selection::terms; }) {
    if (terms) return explain_terms<Selection>(problem, target, chosen);
  }
  return name_of(chosen.choice, problem) + (chosen.tuned ? " (tuned: measured on this card)" : "");
}

// A number of microseconds or the like, for `terms`.
std::string fixed(double value, int decimals = 1);

template <class Selection>
KernelCandidates candidates(typename Selection::Problem const& problem, Target const& target) {
  KernelCandidates result{Selection::key(problem), name_of(Selection::choose(problem, target), problem), {}};
  for (auto const& candidate : Selection::candidates(problem, target)) {
    result.all.push_back({name_of(candidate.choice, problem), candidate.us});
  }
  return result;
}

}  // namespace epiloq::tuning
