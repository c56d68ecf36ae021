// weight_only_mm on the CPU: threads share the products of weight panels by blocks of tokens.

#include <algorithm>
#include <cstring>

#include "core/threads.h"
#include "cpu/common/columns.h"
#include "cpu/common/rows.h"
#include "cpu/isa/avx512_bf16.h"
#include "cpu/w4a16/weight_only.h"

namespace epiloq::ops::weight_only_mm {
namespace {

// Products of a weight and a token that are worth a thread: a few microseconds, which it takes to wake one.
constexpr std::int64_t kWorth = 1 << 16;
constexpr std::uint64_t kInEachByte = 0x0101010101010101u;

int threads_for(Problem const& p, int threads) {
  std::int64_t const work = static_cast<std::int64_t>(p.weight.n) * p.weight.k * p.m;
  return static_cast<int>(std::clamp<std::int64_t>(work / kWorth, 1, std::max(threads, 1)));
}

// Tokens that go through the panels together: as many as fit L2, but enough to repay a panel.
int tokens_at_once(Problem const& p, DType dtype) {
  if (is_for_few(p, dtype)) return p.m;
  bool const in_tiles = by_tiles(p, dtype);
  // Values. (Pairs: 512 tokens of 576 x 1536 and 2048 x 2048 take 8 to 13 % less than with a quarter of them, Zen 4.)
  int const cached = in_tiles ? (1 << 19) / tile_parts(dtype) : by_pairs(p, dtype) ? 1 << 19 : 1 << 17;
  int const least = in_tiles ? 2 * TokenTiles::kTokens : 8 * kPairBlock;  // whole blocks
  return std::max(least, cached / std::max(p.weight.k, 1) / least * least);
}

}  // namespace

PanelParameters::PanelParameters(Weight const& w) {
  std::size_t const count = static_cast<std::size_t>(w.groups + 1) * kPanelRows;
  scale.assign(count, 0.f), offset.assign(count, 0.f);
  zero.assign(count, w.offset != nullptr ? 0.f : static_cast<float>(1 << (w.bits - 1)));
  zero_bytes.assign(count, kInEachByte << (w.bits - 1));
}

void PanelParameters::read(Weight const& w, int panel) {
  int const count = w.groups * kPanelRows;
  std::int64_t const first = static_cast<std::int64_t>(panel) * count;
  read_row(w.scale, w.scale_dtype, first, count, scale.data());
  for (int i = 0; i < count && w.zero != nullptr; ++i) {
    zero[i] = w.zero[first + i], zero_bytes[i] = kInEachByte * w.zero[first + i];
  }
  if (w.offset != nullptr) read_row(w.offset, w.scale_dtype, first, count, offset.data());
}

std::vector<int> groups_of(Weight const& w, int step) {
  std::vector<int> groups(w.padded_k / step, w.groups * kPanelRows);
  int at = 0, end = w.group;
  for (int k = 0; k < w.k; k += step) {
    if (k >= end) end += w.group, at += kPanelRows;
    groups[k / step] = at;
  }
  return groups;
}

std::string describe_on_host(Problem const& p, DType dtype) {
  if (is_for_few(p, dtype)) return "cpu, packed integers in registers";
  if (rounds_weights(p, dtype)) return "cpu, weights of 32 rows rounded to bfloat16 at a time, AMX";
  if (by_tiles(p, dtype)) {
    constexpr char const* kWords[] = {"", ", tokens in two parts", ", tokens in three parts"};
    return std::string("cpu, integers of 32 rows as bfloat16 at a time, AMX") + kWords[tile_parts(dtype) - 1];
  }
  return by_pairs(p, dtype) ? "cpu, integers of 16 rows as bfloat16 at a time, AVX-512 BF16"
                            : "cpu, 16 rows of the weight dequantised at a time";
}

void multiply_on_host(Problem const& p, DType dtype, int threads) {
  threads = threads_for(p, threads);
  Columns const out{p.bias, p.out, dtype, p.stride_out, p.lo, p.hi};
  std::int64_t const panels = (p.weight.n + kPanelRows - 1) / kPanelRows, at_once = tokens_at_once(p, dtype);
  // multiply(parameters, panel, token, count, sums), so many panels after the other of the same tokens.
  auto const with_panels = [&](int together, auto const& multiply) {
    int const rows = together * kPanelRows;
    std::int64_t const steps = (panels + together - 1) / together;
    share(steps * ((p.m + at_once - 1) / at_once), threads, [&](std::int64_t first, std::int64_t last) {
      std::vector<PanelParameters> parameters(together, PanelParameters(p.weight));
      std::vector<Line> sums((at_once + kSmallM) * together);
      for (std::int64_t i = first; i < last; ++i) {
        int const panel = static_cast<int>(i % steps * together), token = static_cast<int>(i / steps * at_once);
        int const count = static_cast<int>(std::min<std::int64_t>(at_once, p.m - token));
        for (int j = 0; j < together && panel + j < panels; ++j) parameters[j].read(p.weight, panel + j);
        multiply(parameters.data(), panel, token, count, sums.data());
        write(out, token, count, panel * kPanelRows, std::min(rows, p.weight.n - panel * kPanelRows),
              sums.data()->values, rows);
      }
    });
  };
  if (is_for_few(p, dtype)) {
    SmallMTokens const tokens(p, dtype);
    with_panels(1, [&](PanelParameters const* parameters, int panel, int, int, Line* sums) {
      multiply_small_m(p, tokens, *parameters, panel, sums);
    });
  } else if (by_tiles(p, dtype)) {
    TiledTokens const tokens(p, dtype, threads);
    with_panels(kPanelsInTiles, [&](PanelParameters const* parameters, int panel, int token, int count, Line* sums) {
      multiply_tiles(p, tokens, parameters, panel, token, count, sums);
    });
  } else {
    LargeMTokens const tokens(p, dtype, threads);
    with_panels(1, [&](PanelParameters const* parameters, int panel, int token, int count, Line* sums) {
      multiply_large_m(p, tokens, *parameters, panel, token, count, sums);
    });
  }
}

}  // namespace epiloq::ops::weight_only_mm
