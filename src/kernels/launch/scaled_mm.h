#pragma once

// The launches of scaled_mm's kernels: declared for the tables of dispatch/scaled_mm, defined and instantiated a few
// table rows, operands and an epilogue at a time in sources that CMake expands from its kernels.cu.in.

#include "epilogue/library.h"
#include "kernels/common/tile_config.h"
#include "problems/gemm.h"

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
