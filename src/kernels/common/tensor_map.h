#pragma once

// TMA descriptors for hand-written kernels.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "core/cuda_check.h"

namespace epiloq::gemm {

// The driver's encoder, looked up at run time: the library does not link libcuda.
template <class Encoder>
Encoder find_encoder(char const* name) {
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned kSince = 12000;
  cuda_check(cudaGetDriverEntryPointByVersion(name, &symbol, kSince, cudaEnableDefault, &found),
             "finding the driver's tensor map encoder");
  if (found != cudaDriverEntryPointSuccess) throw CudaError("epiloq: this driver has no tensor maps");
  return reinterpret_cast<Encoder>(symbol);
}

inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static auto const encoder = find_encoder<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  return encoder;
}
inline decltype(&cuTensorMapEncodeIm2col) image_map_encoder() {
  static auto const encoder = find_encoder<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  return encoder;
}

// Sizes and box from the innermost dimension outwards; strides in bytes of all dimensions but the innermost, multiples
// of 16. Elements are bytes unless `type` says otherwise. Out-of-bounds elements read as zero. L2 promotion is 128
// bytes: 256 is slower when weights are read once.
inline CUtensorMap encode_tensor_map(void const* data, std::initializer_list<std::uint64_t> sizes,
                                     std::initializer_list<std::uint64_t> strides,
                                     std::initializer_list<std::uint32_t> box, CUtensorMapSwizzle swizzle,
                                     CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_UINT8) {
  constexpr std::uint32_t kSteps[] = {1, 1, 1};
  CUtensorMap map;
  CUresult const status =
      tensor_map_encoder()(&map, type, static_cast<std::uint32_t>(sizes.size()), const_cast<void*>(data), sizes.begin(),
                           strides.begin(), box.begin(), kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw CudaError("epiloq: the driver refused a tensor map");
  return map;
}

// Boxes of `box_rows` rows by `box_columns` bytes (32, 64 or 128), one swizzle line per row, as wgmma reads them. The
// matrix address and its stride are multiples of 16 bytes.
inline CUtensorMap tensor_map_of(void const* matrix, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                                 int box_rows, int box_columns = 128) {
  auto const swizzle = box_columns == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
                       : box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                           : CU_TENSOR_MAP_SWIZZLE_128B;
  return encode_tensor_map(matrix, {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows)},
                           {static_cast<std::uint64_t>(stride)},
                           {static_cast<std::uint32_t>(box_columns), static_cast<std::uint32_t>(box_rows)}, swizzle);
}

// A matrix in tiles of rows. TMA fills out-of-bounds rows more slowly than it reads real ones, so the last tile has its
// own, smaller box: a multiple of eight rows, the period of the swizzle. Shared memory outside the box keeps its
// contents.
struct RowTiles {
  CUtensorMap maps[2];
  int boxes[2];  // rows: of a whole tile, and of the last
};
// Tiles of `tile` rows; `knows_last` is false if only the device knows which tile is the last.
inline RowTiles row_tiles_of(void const* matrix, std::int64_t rows, std::int64_t columns, std::int64_t stride, int tile,
                             int size, bool knows_last = true, int box_columns = 128) {
  auto const box_of = [tile](int rows) { return rows >= tile ? tile : (rows + 7) / 8 * 8; };
  int const rest = size % tile, box = box_of(size), last_box = knows_last && rest != 0 ? box_of(rest) : box;
  return {{tensor_map_of(matrix, rows, columns, stride, box, box_columns),
           tensor_map_of(matrix, rows, columns, stride, last_box, box_columns)},
          {box, last_box}};
}

}  // namespace epiloq::gemm
