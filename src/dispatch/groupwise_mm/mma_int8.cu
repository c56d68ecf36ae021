// SM80 and newer: int8 grouped_mm.

#include "dispatch/groupwise_mm/mma.h"

namespace epiloq::ops::groupwise_mm {

template struct Mma<0, gemm::Scales::kPerRowScales, DType::kInt8>;
template struct Mma<1, gemm::Scales::kPerRowScales, DType::kInt8>;

}  // namespace epiloq::ops::groupwise_mm
