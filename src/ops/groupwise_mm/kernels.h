#pragma once

// Where groupwise_mm's kernels live: declared here for the launch tables, defined and instantiated in kernels.cu.in's
// and whole_rows.cu.in's expansions, in mma_int8.cu and mma_float8.cu, and the generic one in generic.cu.

#include "epilogue/library.h"
#include "epiloq/device.h"
#include "gemm/config.h"
#include "gemm/groupwise_problem.h"

namespace epiloq::ops::groupwise_mm {

template <int kRow, bool kColumnScales, DType kOut>
struct Sm90 {
  static void launch(gemm::GroupwiseProblem const&, int device, Stream);
};

template <int kRow, DType kElement, DType kOut, class Epilogue>
struct Sm90WholeRows {
  static void launch(gemm::GroupwiseProblem const&, int device, Stream);
};

template <int kRow, gemm::Scales kScales, DType kElement>
struct Mma {
  static void launch(gemm::GroupwiseProblem const&, DType out, int device, Stream);
};

void launch_generic(gemm::GroupwiseProblem const&, DType element, DType out, int device, Stream);

}  // namespace epiloq::ops::groupwise_mm
