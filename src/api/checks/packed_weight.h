#pragma once

#include "core/checks.h"
#include "epiloq/weight_only_mm.h"
#include "problems/packed_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1 - kPadding;  // for N, K and the rows of x

void check_format(Checker const& check, int bits, std::int64_t group_size);
// Without pointers.
Weight weight_of_sizes(Checker const& check, int bits, std::int64_t n, std::int64_t k, std::int64_t group_size,
                       DType scale_dtype);
Weight checked_weight(Checker const& check, PackedWeight const& weight);  // of integers
Weight checked_weight_of_any_format(Checker const& check, PackedWeight const& weight);
void check_apart(Checker const& check, TensorView const& out, PackedWeight const& weight);

}  // namespace epiloq::ops::weight_only_mm
