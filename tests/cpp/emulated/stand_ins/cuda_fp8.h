#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

// Named, not used: outputs of kernels that are not emulated.
struct __nv_fp8_e4m3;
struct __nv_fp8_e5m2;

using __nv_fp8x2_storage_t = std::uint16_t;
enum __nv_fp8_interpretation_t { __NV_E4M3 };
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t pair, __nv_fp8_interpretation_t) {
  auto const half_of = [](int code) {
    constexpr int kNan = 0x7f;
    // The bits of a half that is 2^-8 times as large.
    float const number = epiloq::float_of_float16(static_cast<std::uint16_t>((code & kNan) << 7)) * 0x1p8F;
    return epiloq::float16_of_float((code & kNan) == kNan ? NAN : code < 128 ? number : -number);
  };
  return {half_of(pair & 0xff), half_of(pair >> 8)};
}
