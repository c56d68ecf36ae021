#pragma once

// Which kernel serves a problem: a pure function of numbers, so that it can be tested and explained without a GPU.

#include <string>

#include "epiloq/device.h"
#include "epiloq/online_quant_mm.h"

namespace epiloq::ops::online_quant_mm {

struct Target {
  Arch arch;
  int sm_count;
  int shared_bytes;  // that a block may have
};

inline constexpr int kStaged = -1;

// A row of configs.h, or kStaged where no row serves.
int choose(OnlineQuantProblem const& problem, Target const& target);
bool has_fused_kernel(std::int64_t group_size, Target const& target);
std::string describe(int choice, OnlineQuantProblem const& problem);

// What an architecture's first card has, for answers without a device.
Target nominal(Arch arch);

}  // namespace epiloq::ops::online_quant_mm
