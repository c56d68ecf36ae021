// One group-wise tile, named and shaped by the macros that sweep.py defines.

#include "gemm/sm90_groupwise.cuh"

using epiloq::gemm::Share;
using Tile =
    epiloq::gemm::Groupwise<M_GROUPS, K_GROUPS, TILE_N, CLUSTER, Share::SHARE, /*column scales=*/false, __nv_bfloat16>;

void NAME(epiloq::gemm::GroupwiseProblem const& problem, int device, epiloq::Stream stream) {
  epiloq::gemm::GroupwiseGemm<Tile>::launch(problem, device, stream);
}
