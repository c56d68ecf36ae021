#pragma once

#include <cstdint>

#include "epilogue/library.h"
#include "epiloq/tensor.h"

namespace epiloq::gemm {

// Element types of A and B. int8 accumulates in int32, float8 in FP32.
struct Inputs {
  DType a, b;

  constexpr bool is_float8() const { return a != DType::kInt8; }
  friend bool operator==(Inputs, Inputs) = default;
};

// Element types of A, B and D.
struct Types {
  DType a, b, out;

  constexpr Inputs inputs() const { return {a, b}; }
};

// D [m, n] = epilogue(A [m, k] B^T), B [n, k]; row-major, strides in elements. A batch is evenly spaced products.
struct Problem {
  int m, n, k;
  std::int64_t stride_a, stride_b, stride_d;
  void const* a;
  void const* b;
  void* d;
  epilogue::Operands operands;
  int batches = 1;
  std::int64_t batch_a = 0, batch_b = 0, batch_d = 0;

  friend bool operator==(Problem const&, Problem const&) = default;
};

using Launch = void (*)(Problem const&, int device, Stream);

}  // namespace epiloq::gemm
