#pragma once

// Where scaled_mm's kernels live: declared here for the launch tables, defined in kernels_<family>.h, and instantiated
// a few table rows, inputs and an epilogue at a time in sources that CMake expands from kernels.cu.in.

#include "epilogue/library.h"
#include "gemm/config.h"
#include "gemm/problem.h"

namespace epiloq::ops::scaled_mm {

using gemm::Inputs;

template <int kRow, Inputs kInputs, class Epilogue>
struct Sm75 {
  static void launch(gemm::Problem const&, int device, Stream);
};
template <int kRow, Inputs kInputs, class Epilogue>
struct Sm80 {
  static void launch(gemm::Problem const&, int device, Stream);
};
template <int kRow, Inputs kInputs, class Epilogue>
struct Skinny {
  static void launch(gemm::Problem const&, int device, Stream);
};
template <int kRow, Inputs kInputs, class Epilogue>
struct Sm89 {
  static void launch(gemm::Problem const&, int device, Stream);
};
template <int kRow, Inputs kInputs, class Epilogue>
struct Sm90 {
  static void launch(gemm::Problem const&, int device, Stream);
};
template <int kRow, Inputs kInputs, class Epilogue>
struct Sm90Float8 {
  static void launch(gemm::Problem const&, int device, Stream);
};
template <int kRow, Inputs kInputs, class Epilogue>
struct Generic {  // one row: nothing to choose
  static void launch(gemm::Problem const&, int device, Stream);
};

}  // namespace epiloq::ops::scaled_mm
