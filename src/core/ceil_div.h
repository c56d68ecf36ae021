#pragma once

#include <cstdint>

namespace epiloq {

// For non-negative values.
constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }
constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

}  // namespace epiloq
