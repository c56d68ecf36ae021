#pragma once

// The launches of int8 convolution kernels: declared for the table of dispatch/conv2d_int8, defined in its
// instantiate.cuh and in kernels/conv2d/int8_depthwise.cu.

#include "kernels/conv2d/im2col.h"
#include "problems/conv2d_int8.h"

namespace epiloq::ops::conv2d_int8 {

// The input's zero point in every byte.
inline unsigned fill_of(Problem const& p) { return static_cast<std::uint8_t>(p.input_zero) * 0x01010101u; }

// Parameters of a launch, equal for all CTAs.
struct TiledProblem {
  Problem problem;
  int channels, outputs;  // of a group
  int columns;            // of the matrix
  int tiles_n;
  unsigned fill;
  conv2d::Column stage;  // the step from one stage to the next
  bool whole_runs;       // runs of 8 outputs start where a vector may
};

using LaunchTiled = void (*)(TiledProblem const&, unsigned blocks, int split, int device, Stream);

template <int kRow>
void launch_tiled(TiledProblem const& problem, unsigned blocks, int split, int device, Stream stream);

void launch_depthwise(Problem const& problem, int channels, Stream stream);

}  // namespace epiloq::ops::conv2d_int8
