// Products of many tokens, or with any weight, on the CPU: the versions of host_many.h.

#include "ops/weight_only_mm/host_many.h"

#include "core/host_rows.h"
#include "core/threads.h"
#include "ops/weight_only_mm/host.h"

namespace epiloq::ops::weight_only_mm {
namespace {

using Multiply = void (*)(SlabByTokens const&, Line* sums);

void plain(SlabByTokens const& s, Line* sums) { Many<4>::multiply_slab(s, sums); }
#ifdef EPILOQ_HAS_CLONES
[[gnu::target("arch=x86-64-v3")]] void v3(SlabByTokens const& s, Line* sums) { Many<8>::multiply_slab(s, sums); }
[[gnu::target("arch=x86-64-v4")]] void v4(SlabByTokens const& s, Line* sums) { Many<16>::multiply_slab(s, sums); }
#endif

Multiply chosen() {
#ifdef EPILOQ_HAS_CLONES
  if (__builtin_cpu_supports("x86-64-v4")) return v4;
  if (__builtin_cpu_supports("x86-64-v3")) return v3;
#endif
  return plain;
}

}  // namespace

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

void multiply_many(Problem const& p, ManyTokens const& tokens, SlabParameters const& parameters, int slab, Line* sums) {
  static Multiply const multiply = chosen();
  Weight const& w = p.weight;
  std::fill_n(sums, p.m, Line{});
  multiply({.q = w.q + slab * slab_bytes(w),
            .bits = w.bits,
            .k = w.k,
            .groups = tokens.groups.data(),
            .scale = parameters.scale.data(),
            .zero = parameters.zero.data(),
            .offset = parameters.offset.data(),
            .x = tokens.x,
            .m = p.m,
            .stride = tokens.stride},
           sums);
  for (int m = 0; m < p.m; ++m) {
    Line const by_parameter = sums[m];
    for (int i = 0; i < kSlab; ++i) sums[m].values[i] = by_parameter.values[parameter_of(i)];
  }
}

}  // namespace epiloq::ops::weight_only_mm
