#pragma once

// Row conversions shared by the CPU operations: to float32 and back, and the range of a row's values.

#include <vector>

#include "epiloq/tensor.h"

// One binary for every x86-64: loops are compiled for AVX-512, AVX2 and the baseline, and chosen at load.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EPILOQ_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define EPILOQ_HAS_CLONES
#else
#define EPILOQ_CLONES
#endif

namespace epiloq {

// `count` elements of x (float32, float16 or bfloat16) from `offset` on as float32,
void read_row(void const* x, DType dtype, std::int64_t offset, int count, float* out);
// in place if they are float32, else in `scratch`.
float const* as_float(void const* x, DType dtype, std::int64_t offset, int count, std::vector<float>& scratch);
// And back, rounded.
void write_row(float const* row, int count, DType dtype, void* out, std::int64_t offset);

struct Range {
  float lo, hi;
  bool has_nan;
};

// [inf, -inf] for no values.
Range range_of(float const* x, int count);

}  // namespace epiloq
