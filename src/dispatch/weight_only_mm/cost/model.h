#pragma once

// Expected time of a weight_only_mm kernel, from its shape and about twenty fitted numbers (costs.h).
//
//   time = factor * longer(start + first load + longer(memory, SMs), power)
//
// The memory reads every weight once. An SM's CTAs run in waves, each of which multiplies its K steps, reduces over the
// cluster and stores. Of the first load, PDL hides the weights that are issued while the preceding kernel ends. Power:
// all products at the clock that the power limit leaves (WGMMA only). The factor is the kernel's.

#include <cstdint>

#include "core/target.h"
#include "dispatch/weight_only_mm/candidates.h"
#include "dispatch/weight_only_mm/cost/costs.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::ops::weight_only_mm {

// Times in microseconds. Those of a CTA are of one wave.
struct Cost {
  std::int64_t bytes = 0;  // of weights and their scales
  std::int64_t ctas = 0, waves = 0;
  int resident = 0;        // CTAs per SM
  std::int64_t steps = 0;  // K steps per CTA
  double start = 0, first_load = 0;
  double memory = 0;
  double arithmetic = 0, load = 0;  // a CTA's K steps: dequantise and multiply; load into the SM
  double cluster = 0, store = 0;    // a CTA's reduction over the cluster; over K groups, and its store
  double sms = 0;                   // all waves
  double power = 0;                 // all products at the clock that the power limit leaves
  double us = 0;
};

// The cost of a row of the GEMV, decode or WGMMA table whose K is split over `choice.split` CTAs of a cluster.
Cost cost_of(Choice const& choice, WeightOnlyMmProblem const& problem, Target const& target,
             Costs const& costs = kSm90Costs);

// Dequantising into memory, then a dense product.
double time_of_dense(WeightOnlyMmProblem const& problem, Target const& target);

}  // namespace epiloq::ops::weight_only_mm
