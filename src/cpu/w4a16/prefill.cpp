// W4A16 prefill on the CPU, for any weight: the instances of prefill.h per instruction set, and tokens for
// avx512_bf16.h.

#include "cpu/w4a16/prefill.h"

#include "core/threads.h"
#include "cpu/isa/versions.h"
#include "cpu/w4a16/prefill_avx512_bf16.h"
#include "cpu/w4a16/weight_only.h"

namespace epiloq::ops::weight_only_mm {

namespace {

#ifdef EPILOQ_HAS_CLONES
void multiply_pairs(PanelByTokens const& panel, int group, LargeMTokens const& all, int first, Line* sums) {
  LargeMPairs::run({.panel = panel, .group = group, .x = all.pairs.data() + first * all.stride}, sums);
}
#else
void multiply_pairs(PanelByTokens const&, int, LargeMTokens const&, int, Line*) {}
#endif

// A token of a block; of an odd K a zero follows.
void interleave_pairs(std::uint16_t const* row, int k, std::uint32_t* out) {
  for (int i = 0; i + 1 < k; i += 2, out += kPairBlock) *out = row[i] | std::uint32_t{row[i + 1]} << 16;
  if (k % 2 != 0) *out = row[k - 1];
}

}  // namespace

bool by_pairs(HostProblem const& p, DType dtype) {
  return has_pairs() && dtype == DType::kBFloat16 && p.weight.offset == nullptr && p.weight.group % 2 == 0;
}

LargeMTokens::LargeMTokens(HostProblem const& p, DType dtype, int threads)
    : groups(groups_of(p.weight, 1)), x(static_cast<float const*>(p.x)), stride(p.stride_x) {
  int const k = p.weight.k;
  if (by_pairs(p, dtype)) {
    auto const* const rows = static_cast<std::uint16_t const*>(p.x);
    stride = (k + 1) / 2;  // pairs
    pairs.resize((p.m + kPairBlock - 1) / kPairBlock * kPairBlock * stride);
    share(p.m, threads, [&](int first, int last) {
      for (int m = first; m < last; ++m)
        interleave_pairs(rows + m * p.stride_x, k,
                         pairs.data() + m / kPairBlock * kPairBlock * stride + m % kPairBlock);
    });
  } else if (dtype != DType::kFloat32) {
    copy.resize(static_cast<std::size_t>(p.m) * k);
    share(p.m, threads, [&](int first, int last) {
      for (int m = first; m < last; ++m)
        read_row(p.x, dtype, m * p.stride_x, k, copy.data() + static_cast<std::size_t>(m) * k);
    });
    x = copy.data(), stride = k;
  }
}

void multiply_large_m(HostProblem const& p, LargeMTokens const& tokens, PackedPanel const& panel, int first, int count,
                      Line* sums) {
  static auto const multiply = Versions<LargeM, PanelByTokens const&, Line*>::here();
  Weight const& w = p.weight;
  std::fill_n(sums, count, Line{});
  PanelByTokens const of_panel{.q = panel.q,
                               .bits = read_bits(w.bits),
                               .k = w.k,
                               .is_fp4 = p.is_fp4(),
                               .groups = tokens.groups.data(),
                               .scale = panel.scale.data(),
                               .zero = panel.zero.data(),
                               .offset = panel.offset.data(),
                               .x = tokens.x + first * tokens.stride,
                               .m = count,
                               .stride = tokens.stride};
  if (tokens.pairs.empty()) {
    multiply(of_panel, sums);
  } else {
    multiply_pairs(of_panel, w.group, tokens, first, sums);
  }
  for (int m = 0; m < count; ++m) {
    Line const by_parameter = sums[m];
    for (int i = 0; i < kPanelRows; ++i) sums[m].values[i] = by_parameter.values[parameter_of(i)];
  }
}

}  // namespace epiloq::ops::weight_only_mm
