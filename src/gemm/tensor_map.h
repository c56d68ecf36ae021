#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "cutlass/cuda_host_adapter.hpp"
#include "epiloq/error.h"

namespace epiloq::gemm {

// TMA's view of a dense byte matrix [rows, row_bytes]: boxes [box_rows, box_bytes], swizzled over their own width (64
// or 128 bytes); zeros past the last row. The base and row_bytes are multiples of 16.
inline CUtensorMap tensor_map(void const* base, int rows, int row_bytes, int box_rows, int box_bytes) {
  CUtensorMap map;
  cuuint64_t const sizes[] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(rows)};
  cuuint64_t const strides[] = {static_cast<cuuint64_t>(row_bytes)};
  cuuint32_t const box[] = {static_cast<cuuint32_t>(box_bytes), static_cast<cuuint32_t>(box_rows)};
  cuuint32_t const steps[] = {1, 1};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(base), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw CudaError("epiloq: describing a matrix to TMA: error " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace epiloq::gemm
