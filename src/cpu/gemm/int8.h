#pragma once

// int8 products on the CPU, exact in int32.

#include <string>

#include "cpu/common/panels.h"

namespace epiloq {

// A [m, k] B^T, B [n, k].
struct Int8Product {
  int m, n, k;
  std::int8_t const *a, *b;
  std::int64_t stride_a, stride_b;
};

using Int8Sums = PanelSums<std::int32_t>;

// Calls finish(sums) of parts that together are the product, from at most `threads` threads.
void multiply_int8(Int8Product const& product, int threads, FinishPanel<std::int32_t> const& finish);
// Name of the kernel that multiplies so many tokens, for `explain`.
std::string describe_int8(std::int64_t tokens);

}  // namespace epiloq
