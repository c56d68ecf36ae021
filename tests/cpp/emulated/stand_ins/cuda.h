#pragma once

// The driver's tensor maps, of two dimensions.

#include <cstdint>

struct alignas(64) CUtensorMap {
  unsigned char* data;
  std::uint64_t sizes[2], stride;  // elements; bytes
  std::uint32_t box[2];
  int element_bytes, swizzle_bytes;
};
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8 = 1, CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 4 };  // by their bytes
enum CUtensorMapSwizzle {                                                                             // likewise
  CU_TENSOR_MAP_SWIZZLE_NONE = 0,
  CU_TENSOR_MAP_SWIZZLE_32B = 32,
  CU_TENSOR_MAP_SWIZZLE_64B = 64,
  CU_TENSOR_MAP_SWIZZLE_128B = 128
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_128B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// Refuses what the driver refuses.
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, std::uint32_t rank, void* data,
                                       std::uint64_t const* sizes, std::uint64_t const* strides,
                                       std::uint32_t const* box, std::uint32_t const*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  std::uint64_t const row_bytes = std::uint64_t{box[0]} * type;
  bool const is_aligned =
      reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && strides[0] % 16 == 0 && row_bytes % 16 == 0;
  bool const has_sizes = sizes[0] > 0 && sizes[1] > 0 && box[0] > 0 && box[0] <= 256 && box[1] > 0 && box[1] <= 256;
  if (rank != 2 || !is_aligned || !has_sizes || (swizzle != 0 && row_bytes > swizzle)) return CUDA_ERROR_INVALID_VALUE;
  *map = {static_cast<unsigned char*>(data), {sizes[0], sizes[1]}, strides[0], {box[0], box[1]}, type, swizzle};
  return CUDA_SUCCESS;
}
// Not emulated; its address is never asked for.
CUresult cuTensorMapEncodeIm2col();
