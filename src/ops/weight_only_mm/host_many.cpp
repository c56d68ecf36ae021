// Products of many tokens, or with any weight, on the CPU: the versions of host_many.h.

#include "ops/weight_only_mm/host_many.h"

#include "core/host_versions.h"
#include "core/threads.h"
#include "ops/weight_only_mm/host.h"

namespace epiloq::ops::weight_only_mm {

ManyTokens::ManyTokens(Problem const& p, DType dtype, int threads)
    : groups(groups_of(p.weight, 1)), x(static_cast<float const*>(p.x)), stride(p.stride_x) {
  if (dtype == DType::kFloat32) return;
  int const k = p.weight.k;
  copy.resize(static_cast<std::size_t>(p.m) * k);
  share(p.m, threads, [&](int first, int last) {
    for (int m = first; m < last; ++m)
      read_row(p.x, dtype, m * p.stride_x, k, copy.data() + static_cast<std::size_t>(m) * k);
  });
  x = copy.data(), stride = k;
}

void multiply_many(Problem const& p, ManyTokens const& tokens, SlabParameters const& parameters, int slab, int first,
                   int count, Line* sums) {
  static auto const multiply = Versions<Many, SlabByTokens const&, Line*>::here();
  Weight const& w = p.weight;
  std::fill_n(sums, count, Line{});
  multiply({.q = w.q + slab * slab_bytes(w),
            .bits = w.bits,
            .k = w.k,
            .groups = tokens.groups.data(),
            .scale = parameters.scale.data(),
            .zero = parameters.zero.data(),
            .offset = parameters.offset.data(),
            .x = tokens.x + first * tokens.stride,
            .m = count,
            .stride = tokens.stride},
           sums);
  for (int m = 0; m < count; ++m) {
    Line const by_parameter = sums[m];
    for (int i = 0; i < kSlab; ++i) sums[m].values[i] = by_parameter.values[parameter_of(i)];
  }
}

}  // namespace epiloq::ops::weight_only_mm
