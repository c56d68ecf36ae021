#pragma once

#include "core/checks.h"
#include "epiloq/granularity.h"
#include "problems/quantizers/quantized_rows.h"

namespace epiloq {

// Checks that `out` has a row of `cols` columns, or more if it may be padded, for each row of x, and that a kernel's
// integers hold their numbers.
Matrix check_rows(Checker const& check, TensorView const& out, TensorView const& x, std::int64_t cols,
                  bool may_be_padded = false);

// Checks the outputs `q` ("out") and `scale` of `cols` columns for each row of x.
QuantizedRows check_quantized(Checker const& check, TensorView const& q, TensorView const& scale, TensorView const& x,
                              std::int64_t cols, Granularity granularity, int group_size, bool ue8m0);

// `inputs_in_vectors`: inputs are whole vectors on 16 bytes. `kernels`: the number of one-pass kernels available.
RowPlan plan_rows(QuantizedRows const& rows, bool inputs_in_vectors, int sm_count, int kernels = 3);
char const* describe(RowPlan const& plan);

// Whether rows of `cols` elements can be read 16 bytes at a time.
bool in_vectors(void const* data, DType dtype, std::int64_t stride, std::int64_t cols);

}  // namespace epiloq
