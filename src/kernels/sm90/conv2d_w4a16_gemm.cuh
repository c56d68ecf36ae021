#pragma once

// SM90: the weight-only WGMMA kernel with tokens that TMA gathers from an image in im2col mode (image_boxes.h).

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/tensor_map.h"
#include "kernels/conv2d/image_boxes.h"
#include "kernels/launch/conv2d_weight_only.h"
#include "kernels/sm90/w4a16/w4a16_gemm.cuh"
#include "kernels/sm90/w4a16/w4a16_launch.cuh"

namespace epiloq::ops::conv2d_weight_only {

namespace wo = weight_only_mm;

struct ImageParams : wo::TileParams {
  conv2d::Shape shape;
  int padded_channels;  // columns per tap
};

// Like wo::MatrixTokens, for output pixels. kColumns columns lie within one tap.
struct ImageTokens {
  using Params = ImageParams;
  static constexpr int kBytes = 2;
  static constexpr int kProducerRegisters = 40;

  Params const& params;
  CUtensorMap const& map;
  conv2d::FirstTap first;
  conv2d::Column column;

  __device__ ImageTokens(Params const& params_, CUtensorMap const& map_, int first_pixel, int first_step)
      : params(params_),
        map(map_),
        first(conv2d::first_tap_of(params.shape, static_cast<unsigned>(first_pixel))),
        column(conv2d::Column::of(params.shape, params.padded_channels, first_step * wo::kPadding)) {}

  __device__ __forceinline__ void issue(SharedAddress to, SharedAddress barrier) {
    conv2d::Box const box = box_of(params.shape, column);
    auto* const generic_barrier = static_cast<std::uint64_t*>(__cvta_shared_to_generic(barrier));
    cute::SM90_TMA_LOAD_IM2COL_4D::copy(&map, generic_barrier, __cvta_shared_to_generic(to), box.channel, first.x,
                                        first.y, first.image, box.x, box.y);
    column.advance(params.shape, params.padded_channels, {0, 0, wo::kColumns});
  }
};

// Boxes of pixels by wo::kColumns channels, one swizzle line per pixel, as wgmma reads them.
inline CUtensorMap tensor_map_of(void const* x, conv2d::ImageMap const& m, int pixel_box) {
  CUtensorMap map;
  CUresult const status = gemm::image_map_encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, static_cast<std::uint32_t>(m.sizes.size()), const_cast<void*>(x),
      m.sizes.data(), m.strides.data(), m.lower.data(), m.upper.data(), wo::kColumns,
      static_cast<std::uint32_t>(pixel_box), m.steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw CudaError("epiloq: the driver refused a tensor map of an image");
  return map;
}

// Everything that the maps depend on.
struct ImageReads {
  wo::WeightReads weight;
  void const* x;
  conv2d::Shape shape;
  wo::TokenBoxes boxes;

  CUtensorMap token_map(int box) const { return tensor_map_of(x, *conv2d::image_map_of(shape, kElementBytes), box); }
  bool operator==(ImageReads const&) const = default;
};

}  // namespace epiloq::ops::conv2d_weight_only
