// One group-wise tile, named and shaped by the macros that sweep.py defines.

#include "gemm/sm90_groupwise.cuh"

using Tile = epiloq::gemm::Groupwise<M_GROUPS, K_GROUPS, TILE_N, ROUNDS, epiloq::gemm::Scales::kBlocks,
                                     cutlass::float_e4m3_t, __nv_bfloat16>;

void NAME(epiloq::gemm::GroupwiseProblem const& problem, int device, epiloq::Stream stream) {
  epiloq::gemm::GroupwiseGemm<Tile>::launch(problem, device, stream);
}
