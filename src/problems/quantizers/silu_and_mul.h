#pragma once

#include <cstdint>

#include "epiloq/gate.h"
#include "epiloq/tensor.h"

namespace epiloq::ops::silu_and_mul {

struct Problem {
  int rows, cols;  // of out
  void const* x;   // gates, followed by cols factors, or each factor after its gate if interleaved
  void* out;
  std::int64_t stride_x, stride_out;
  Gate gate;  // as check_gate returns it
  bool interleaved;
};

// `in_vectors`: rows of x and out are whole vectors on 16 bytes.
void launch(Problem const& problem, bool in_vectors, DType x, int device, Stream stream);

}  // namespace epiloq::ops::silu_and_mul
