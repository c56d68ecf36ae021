// SM89 and newer: FP8 groupwise_mm and grouped_mm.

#include "dispatch/groupwise_mm/mma.h"

namespace epiloq::ops::groupwise_mm {

template struct Mma<0, gemm::Scales::kBlocks, DType::kFloat8E4M3>;
template struct Mma<1, gemm::Scales::kBlocks, DType::kFloat8E4M3>;
template struct Mma<0, gemm::Scales::kColumns, DType::kFloat8E4M3>;
template struct Mma<1, gemm::Scales::kColumns, DType::kFloat8E4M3>;
template struct Mma<0, gemm::Scales::kPerRowScales, DType::kFloat8E4M3>;
template struct Mma<1, gemm::Scales::kPerRowScales, DType::kFloat8E4M3>;

}  // namespace epiloq::ops::groupwise_mm
