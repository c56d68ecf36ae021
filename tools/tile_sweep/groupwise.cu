// One group-wise tile, named and shaped by the macros that sweep.py defines.

#include "kernels/sm90/groupwise_gemm.cuh"

namespace {

// Of this source alone, as two of them may have the same tile, shared and not: of one kernel in two objects CUDA
// prepares only one.
struct Own : epiloq::epilogue::Scaled {};
using Tile = epiloq::gemm::Groupwise<M_GROUPS, K_GROUPS, TILE_N, ROUNDS, epiloq::gemm::Scales::SCALES, CUTLASS_ELEMENT,
                                     __nv_bfloat16, Own>;

}  // namespace

void NAME(epiloq::gemm::GroupwiseProblem const& problem, int device, epiloq::Stream stream) {
  using Gemm = epiloq::gemm::GroupwiseGemm<Tile>;
  auto shared = problem;
  if (SHARES && Gemm::shared(problem, epiloq::device_properties(device).sm_count) > 0) shared.split_k = 2;
  Gemm::launch(shared, device, stream);
}
