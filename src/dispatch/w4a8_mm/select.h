#pragma once

// Kernel choice of w4a8_mm: a pure function of numbers.

#include <cstdint>

#include "core/target.h"

namespace epiloq::ops::w4a8_mm {

struct Choice {
  int row;        // of kRows
  int split = 1;  // CTAs of a cluster that split K
};

Choice choose(std::int64_t m, std::int64_t n, std::int64_t k, Target const& target);

}  // namespace epiloq::ops::w4a8_mm
