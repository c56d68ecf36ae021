#pragma once

// Chooses the FP8 quantisation kernel of fp8.cu; host code, also for `explain`.

#include "problems/quantizers/quantize_fp8.h"

namespace epiloq::ops::quantize_fp8 {

constexpr int kPerLane = 32;  // elements per thread of kTiles

enum class Kernel : std::uint8_t { kTiles, kRows, kBlocks, kElements };

struct Plan {
  Kernel kernel;
  int lanes;  // kTiles: threads that share a scale
};

// How a problem with static or one-pass scales is distributed over a device.
Plan plan(Problem const& problem, DType x);
char const* describe(Kernel kernel);

// Rows in whole vectors that start on 16 bytes in x and 8 in q.
bool in_vectors(Problem const& problem, DType x);

}  // namespace epiloq::ops::quantize_fp8
