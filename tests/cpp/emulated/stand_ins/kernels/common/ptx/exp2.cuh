#pragma once

#include <cmath>

namespace epiloq {

inline float exp2_approximate(float x) { return x < -126 ? 0.F : std::exp2(x); }

}  // namespace epiloq
