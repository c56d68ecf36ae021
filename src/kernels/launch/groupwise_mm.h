#pragma once

// The launches of groupwise GEMM kernels: declared for the tables of dispatch/groupwise_mm, defined and instantiated in
// what CMake expands from its *.cu.in, in its mma_*.cu, and in kernels/generic/groupwise_gemm.cu.

#include "epilogue/library.h"
#include "epiloq/device.h"
#include "kernels/common/tile_config.h"
#include "problems/groupwise_gemm.h"

namespace epiloq::ops::groupwise_mm {

template <int kRow, gemm::Scales kScales, DType kOut>
struct Sm90PerGroup {
  static void launch(gemm::GroupwiseProblem const&, int device, Stream);
};

template <int kRow, DType kElement, DType kOut, class Epilogue>
struct Sm90PerRow {
  static void launch(gemm::GroupwiseProblem const&, int device, Stream);
};

template <int kRow, gemm::Scales kScales, DType kElement>
struct Mma {
  static void launch(gemm::GroupwiseProblem const&, DType out, int device, Stream);
};

void launch_generic(gemm::GroupwiseProblem const&, DType element, DType out, int device, Stream);

}  // namespace epiloq::ops::groupwise_mm
