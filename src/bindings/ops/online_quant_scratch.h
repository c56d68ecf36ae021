#pragma once

#include "bindings/scratch.h"
#include "epiloq/online_quant_mm.h"

namespace epiloq::bindings {

// Workspace of the CUDA kernels for the quantised activations of a call.
class OnlineQuantScratch {
 public:
  OnlineQuantScratch(TensorArg const& x, OnlineQuantMm const& call)
      : blocks_(call.parameters.shape[0]),
        padded_m_((rows(x.view, call.in_features) + 3) / 4 * 4),
        scratch_(x, {{DType::kInt8, rows(x.view, call.in_features), call.values.shape[1] * (call.bits == 4 ? 2 : 1)},
                     {DType::kFloat32, 3 * blocks_, 4 * padded_m_}}) {}

  OnlineQuantWorkspace workspace() const {
    TensorView const& values = scratch_[0];
    return {values, TensorView(scratch_[1].data, DType::kFloat32, values.device, {blocks_, 3, 4 * padded_m_})};
  }

 private:
  static std::int64_t rows(TensorView const& x, std::int64_t in_features) {
    return in_features > 0 && x.rank <= TensorView::kMaxRank ? x.numel() / in_features : 0;  // otherwise refused later
  }

  std::int64_t blocks_, padded_m_;
  Scratch scratch_;
};

}  // namespace epiloq::bindings
