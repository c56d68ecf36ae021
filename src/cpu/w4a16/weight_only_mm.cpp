// weight_only_mm on the CPU: threads share the products of weight panels by blocks of tokens.

#include <algorithm>
#include <cstring>

#include "core/threads.h"
#include "cpu/common/columns.h"
#include "cpu/common/rows.h"
#include "cpu/isa/avx512_bf16.h"
#include "cpu/w4a16/weight_only.h"
#include "problems/grouped_packed.h"

namespace epiloq::ops::weight_only_mm {
namespace {

// Products of a weight and a token that are worth a thread: a few microseconds, which it takes to wake one.
constexpr std::int64_t kWorth = 1 << 16;

int threads_for(HostProblem const& p, int threads) {
  std::int64_t const work = static_cast<std::int64_t>(p.weight.n) * p.weight.k * p.m;
  return static_cast<int>(std::clamp<std::int64_t>(work / kWorth, 1, std::max(threads, 1)));
}

// Tokens that go through the panels together: as many as fit L2, but enough to repay a panel.
int tokens_at_once(HostProblem const& p, DType dtype) {
  if (is_for_few(p, dtype)) return p.m;
  bool const in_tiles = by_tiles(p, dtype);
  // Values. (Pairs: 512 tokens of 576 x 1536 and 2048 x 2048 take 8 to 13 % less than with a quarter of them, Zen 4.)
  int const cached = in_tiles ? (1 << 19) / tile_parts(dtype) : by_pairs(p, dtype) ? 1 << 19 : 1 << 17;
  int const least = in_tiles ? 2 * TokenTiles::kTokens : 8 * kPairBlock;  // whole blocks
  return std::max(least, cached / std::max(p.weight.k, 1) / least * least);
}

std::string describe(HostProblem const& p, DType dtype) {
  char const* const numbers = p.is_fp4() ? "E2M1 numbers" : "integers";
  if (is_for_few(p, dtype)) return std::string("cpu, packed ") + numbers + " in registers";
  if (rounds_weights(p, dtype)) return "cpu, weights of 32 rows rounded to bfloat16 at a time, AMX";
  if (by_tiles(p, dtype)) {
    constexpr char const* kWords[] = {"", ", tokens in two parts", ", tokens in three parts"};
    return std::string("cpu, ") + numbers + " of 32 rows as bfloat16 at a time, AMX" + kWords[tile_parts(dtype) - 1];
  }
  return by_pairs(p, dtype) ? std::string("cpu, ") + numbers + " of 16 rows as bfloat16 at a time, AVX-512 BF16"
                            : "cpu, 16 rows of the weight dequantised at a time";
}

void scale(float* values, std::int64_t count, float factor) {
  for (std::int64_t i = 0; i < count; ++i) values[i] *= factor;
}

void multiply(HostProblem const& p, DType dtype, int threads) {
  threads = threads_for(p, threads);
  Columns const out{p.bias, p.out, dtype, p.stride_out, p.lo, p.hi};
  std::int64_t const panels = (p.weight.n + kPanelRows - 1) / kPanelRows, at_once = tokens_at_once(p, dtype);
  // multiply(panels, how many, token, count, sums), up to `together` panels by the same tokens.
  auto const with_panels = [&](int together, auto const& multiply) {
    int const rows = together * kPanelRows;
    std::int64_t const steps = (panels + together - 1) / together;
    bool const in_fours = p.format == WeightFormat::kNvfp4 && is_for_few(p, dtype);
    share(steps * ((p.m + at_once - 1) / at_once), threads, [&](std::int64_t first, std::int64_t last) {
      std::vector<PackedPanel> read(together, PackedPanel(p.weight, p.format, in_fours));
      std::vector<Line> sums((at_once + kSmallM) * together);
      for (std::int64_t i = first; i < last; ++i) {
        int const panel = static_cast<int>(i % steps * together), token = static_cast<int>(i / steps * at_once);
        int const count = static_cast<int>(std::min<std::int64_t>(at_once, p.m - token));
        int const here = static_cast<int>(std::min<std::int64_t>(together, panels - panel));
        for (int j = 0; j < here; ++j) read[j].read(p.weight, panel + j);
        multiply(read.data(), here, token, count, sums.data());
        if (p.factor != nullptr) scale(sums.data()->values, std::int64_t{count} * rows, *p.factor);
        write(out, token, count, panel * kPanelRows, std::min(rows, p.weight.n - panel * kPanelRows),
              sums.data()->values, rows);
      }
    });
  };
  if (is_for_few(p, dtype)) {
    SmallMTokens const tokens(p, dtype);
    with_panels(
        1, [&](PackedPanel const* panel, int, int, int, Line* sums) { multiply_small_m(p, tokens, *panel, sums); });
  } else if (by_tiles(p, dtype)) {
    TiledTokens const tokens(p, dtype, threads);
    with_panels(kPanelsInTiles, [&](PackedPanel const* panels, int here, int token, int count, Line* sums) {
      multiply_tiles(p, tokens, panels, here, token, count, sums);
    });
  } else {
    LargeMTokens const tokens(p, dtype, threads);
    with_panels(1, [&](PackedPanel const* panel, int, int token, int count, Line* sums) {
      multiply_large_m(p, tokens, *panel, token, count, sums);
    });
  }
}

}  // namespace

std::vector<int> groups_of(Weight const& w, int step) {
  std::vector<int> groups(w.padded_k / step, w.groups * kPanelRows);
  int at = 0, end = w.group;
  for (int k = 0; k < w.k; k += step) {
    if (k >= end) end += w.group, at += kPanelRows;
    groups[k / step] = at;
  }
  return groups;
}

void multiply_on_host(Problem const& problem, DType dtype, int threads) {
  multiply(HostProblem{problem}, dtype, threads);
}
std::string describe_on_host(Problem const& problem, DType dtype) { return describe(HostProblem{problem}, dtype); }

}  // namespace epiloq::ops::weight_only_mm

namespace epiloq::ops::grouped_packed_mm {

using weight_only_mm::HostProblem;

void multiply_on_host(Problem const& problem, WeightFormat format, DType dtype, int threads) {
  weight_only_mm::multiply(HostProblem{problem.product, format, problem.factor}, dtype, threads);
}
std::string describe_on_host(Problem const& problem, WeightFormat format, DType dtype) {
  return weight_only_mm::describe(HostProblem{problem.product, format}, dtype);
}

}  // namespace epiloq::ops::grouped_packed_mm
