// One group-wise tile, named and shaped by the macros that sweep.py defines.

#include "kernels/sm90/groupwise_gemm.cuh"

namespace {

// An epilogue type local to this source: the same tile may be compiled with and without split-K, and CUDA registers
// only one of two identical kernels in different objects.
struct Own : epiloq::epilogue::Scaled {};
using Tile = epiloq::gemm::Groupwise<M_GROUPS, K_GROUPS, TILE_N, ROUNDS, epiloq::gemm::Scales::SCALES, CUTLASS_ELEMENT,
                                     __nv_bfloat16, Own>;

}  // namespace

void NAME(epiloq::gemm::GroupwiseProblem const& problem, int device, epiloq::Stream stream) {
  using Gemm = epiloq::gemm::GroupwiseGemm<Tile>;
  auto split = problem;
  int const sm_count = epiloq::device_properties(device).sm_count;
  if (SPLIT_K && Gemm::split_tile_count(problem, sm_count) > 0) split.split_k = 2;
  Gemm::launch(split, device, stream);
}
