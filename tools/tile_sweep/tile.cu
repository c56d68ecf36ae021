// One SM90 tile, named and shaped by the macros that sweep.py defines.

#include "kernels/sm90/gemm_cutlass.h"

using epiloq::gemm::Schedule;
static constexpr epiloq::gemm::CutlassWgmmaConfig kTile{{TILE_M, TILE_N, TILE_K}, CLUSTER_M, CLUSTER_N,
                                                        Schedule::SCHEDULE,       SWAP,      FAST_ACCUM};
static constexpr epiloq::gemm::Inputs kInputs{epiloq::DType::OPERAND, epiloq::DType::OPERAND};

void NAME(epiloq::gemm::Problem const& problem, int device, epiloq::Stream stream) {
  epiloq::gemm::Sm90Gemm<kTile, kInputs, epiloq::epilogue::Scaled>::launch(problem, device, stream);
}
