#pragma once

#include <cstdint>

namespace epiloq {

// Inputs of an RMS norm, and the sum with the residual, which it writes.
struct NormInputs {
  void const* x;
  void const* weight;
  void const* residual;  // null: none
  void* residual_out;
  std::int64_t stride_x, stride_residual, stride_residual_out;
  float eps;
};

}  // namespace epiloq
