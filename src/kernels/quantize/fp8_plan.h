#pragma once

#include "problems/quantize_fp8.h"

namespace epiloq::ops::quantize_fp8 {

constexpr int kPerLane = 32;  // elements that a thread of kTiles takes

enum class Kernel : std::uint8_t { kTiles, kRows, kBlocks, kElements };

struct Plan {
  Kernel kernel;
  int lanes;  // kTiles: threads that share a scale
};

// How a problem, static or measured in one pass, is spread over a device.
Plan plan(Problem const& problem, DType x);
char const* describe(Kernel kernel);

// Rows that start on 16 bytes for x and 8 for q, in whole vectors.
bool in_vectors(Problem const& problem, DType x);

}  // namespace epiloq::ops::quantize_fp8
