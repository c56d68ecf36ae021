#pragma once

#include <limits>

namespace epiloq {

// The gate of a gated activation, g' * sigmoid(alpha g') * (u' + offset), where g' = min(g, limit) and
// u' = min(max(u, -limit), limit). The defaults are SiLU's.
struct Gate {
  float alpha = 1.f;                                     // positive and finite
  float limit = std::numeric_limits<float>::infinity();  // positive
  float offset = 0.f;                                    // finite

  constexpr bool is_silu() const {
    return alpha == 1.f && limit == std::numeric_limits<float>::infinity() && offset == 0.f;
  }
};

}  // namespace epiloq
