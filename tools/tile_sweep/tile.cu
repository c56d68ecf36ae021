// One SM90 tile, named and shaped by the macros that sweep.py defines.

#include "gemm/sm90.h"

using epiloq::gemm::Schedule;
static constexpr epiloq::gemm::WgmmaConfig kTile{
    {TILE_M, TILE_N, TILE_K}, CLUSTER_M, CLUSTER_N, Schedule::SCHEDULE, SWAP, BLOCKS_PER_SM, EARLY_BYTES};

void NAME(epiloq::gemm::Problem const& problem, int device, epiloq::Stream stream) {
  epiloq::gemm::Sm90Gemm<kTile, cutlass::bfloat16_t, epiloq::epilogue::Scaled>::launch(problem, device, stream);
}
