// DeepGEMM's kernel for large M, for comparison in scale groups of 128: 256 x 128 tiles, multicast of A within clusters
// of two CTAs, N and K as template arguments, as in DeepGEMM (sweep.py writes shapes.inc from --shapes). Compiled with
// the headers of sgl-deep-gemm, which include their own CUTLASS.

#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>

#include "core/cuda_check.h"
#include "epiloq/error.h"
#include "kernels/common/tensor_map.h"
#include "problems/groupwise_gemm.h"

namespace {

using epiloq::gemm::GroupwiseProblem;

constexpr int kM = 256, kN = 128, kK = 128, kStages = 3, kSwizzle = 128, kCopyThreads = 128, kConsumerThreads = 256;

template <int kSizeN, int kSizeK>
void launch(GroupwiseProblem const& p, epiloq::Stream stream) {
  constexpr int kSms = 132, kBlocks = 2;
  auto* const kernel =
      &deep_gemm::sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, kSizeN, kSizeK, 1, kM, kN, kK, kSwizzle, kSwizzle,
                                          kSwizzle, kStages, kCopyThreads, kConsumerThreads, kBlocks, true, kSms,
                                          deep_gemm::GemmType::Normal, cutlass::bfloat16_t,
                                          deep_gemm::epilogue::transform::EpilogueIdentity>;
  constexpr int kScaleBytes = (kSizeK / kK * 4 + 7) / 8 * 8, kBarrierBytes = 2 * kStages * 8;
  constexpr int kSharedBytes =
      kM * kN * 2 + kStages * ((kM + kN) * kK + kM * 4) + kScaleBytes + (kBarrierBytes + 15) / 16 * 16;
  epiloq::cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
                     "asking for shared memory");
  using U = std::uint64_t;
  namespace gemm = epiloq::gemm;
  cute::TmaDescriptor const a = gemm::tensor_map_of(p.a, p.m, p.k, p.stride_a, kM);
  cute::TmaDescriptor const b = gemm::tensor_map_of(p.b, p.n, p.k, p.stride_b, kN);
  cute::TmaDescriptor const d = gemm::encode_tensor_map(p.d, {U(p.n), U(p.m)}, {U(p.stride_d) * 2}, {kSwizzle / 2, kM},
                                                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
  cute::TmaDescriptor const scales =
      gemm::encode_tensor_map(p.scale_a.ptr, {U(p.m), U(p.k) / kK}, {U(p.scale_a.stride_k) * 4}, {kM, 1},
                              CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
  cudaLaunchAttribute pairs{.id = cudaLaunchAttributeClusterDimension};
  pairs.val.clusterDim = {kBlocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = kSms, config.blockDim = kCopyThreads + kConsumerThreads, config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream), config.attrs = &pairs, config.numAttrs = 1;
  epiloq::cuda_check(cudaLaunchKernelEx(&config, kernel, const_cast<float*>(p.scale_b.ptr), static_cast<int*>(nullptr),
                                        std::uint32_t(p.m), std::uint32_t(p.n), std::uint32_t(p.k), a, b, d, scales),
                     "launching DeepGEMM's kernel");
}

}  // namespace

void NAME(GroupwiseProblem const& problem, int, epiloq::Stream stream) {
#define SHAPE(N, K) \
  if (problem.n == N && problem.k == K) return launch<N, K>(problem, stream);
#include "shapes.inc"
#undef SHAPE
  throw epiloq::Unsupported("DeepGEMM's kernel was not compiled for this N and K");
}
