// weight_only_mm on the CPU: threads share the products of weight panels by blocks of tokens.

#include <algorithm>
#include <bit>
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
constexpr std::uint64_t kInEachByte = 0x0101010101010101u;

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

// 2^(byte - 127), and NaN for 255.
EPILOQ_CLONES void read_e8m0(std::uint8_t const* bytes, int count, float* out) {
  for (int i = 0; i < count; ++i) {
    std::uint32_t const byte = bytes[i];
    out[i] = std::bit_cast<float>(byte == 0 ? 1u << 22 : byte == 255 ? 0x7fc00000u : byte << 23);
  }
}

// A scale of NVFP4: the upper eight bits after the sign of 128 times it as float16.
EPILOQ_CLONES void read_packed_e4m3(std::uint8_t const* bytes, int count, float* out) {
  constexpr std::uint32_t kNotFinite = 0xf8;
  for (int i = 0; i < count; ++i) {
    std::uint32_t const byte = bytes[i];
    float const scale = std::bit_cast<float>(byte << 20) * 0x1p105f;  // float16's exponents become float32's
    out[i] = byte >= kNotFinite ? __builtin_nanf("") : scale;
  }
}

// [groups, 16] to [groups / 4, 16, 4].
void put_in_fours(std::uint8_t const* bytes, int count, std::uint8_t* out) {
  using Bytes = Vectors<kPanelRows>::Bytes;
  constexpr int kBytes = 4 * kPanelRows;
  for (int at = 0; at < count; at += kBytes) {
    Bytes groups[4], low[2], high[2], fours[4];
    std::memcpy(groups, bytes + at, kBytes);
    for (int i = 0; i < 2; ++i) zip_low(low[i], groups[i], groups[i + 2]), zip_high(high[i], groups[i], groups[i + 2]);
    zip_low(fours[0], low[0], low[1]), zip_high(fours[1], low[0], low[1]);
    zip_low(fours[2], high[0], high[1]), zip_high(fours[3], high[0], high[1]);
    std::memcpy(out + at, fours, kBytes);
  }
}

std::string describe(HostProblem const& p, DType dtype) {
  char const* const numbers = p.is_fp4() ? "E2M1 numbers" : "integers";
  if (is_for_few(p, dtype)) return std::string("cpu, packed ") + numbers + " in registers";
  if (rounds_weights(p, dtype)) return "cpu, weights of 32 rows rounded to bfloat16 at a time, AMX";
  if (by_tiles(p, dtype)) {
    constexpr char const* kWords[] = {"", ", tokens in two parts", ", tokens in three parts"};
    return std::string("cpu, integers of 32 rows as bfloat16 at a time, AMX") + kWords[tile_parts(dtype) - 1];
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
  // multiply(parameters, panel, token, count, sums), so many panels after the other of the same tokens.
  auto const with_panels = [&](int together, auto const& multiply) {
    int const rows = together * kPanelRows;
    std::int64_t const steps = (panels + together - 1) / together;
    bool const in_fours = p.format == WeightFormat::kNvfp4 && is_for_few(p, dtype);
    share(steps * ((p.m + at_once - 1) / at_once), threads, [&](std::int64_t first, std::int64_t last) {
      std::vector<PanelParameters> parameters(together, PanelParameters(p.weight, p.format, in_fours));
      std::vector<Line> sums((at_once + kSmallM) * together);
      for (std::int64_t i = first; i < last; ++i) {
        int const panel = static_cast<int>(i % steps * together), token = static_cast<int>(i / steps * at_once);
        int const count = static_cast<int>(std::min<std::int64_t>(at_once, p.m - token));
        for (int j = 0; j < together && panel + j < panels; ++j) parameters[j].read(p.weight, panel + j);
        multiply(parameters.data(), panel, token, count, sums.data());
        if (p.factor != nullptr) scale(sums.data()->values, std::int64_t{count} * rows, *p.factor);
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

}  // namespace

PanelParameters::PanelParameters(Weight const& w, WeightFormat format, bool in_fours)
    : format_(format), fours_(in_fours ? w.groups * kPanelRows : 0) {
  std::size_t const count = static_cast<std::size_t>(w.groups + 1) * kPanelRows;
  scale.assign(count, 0.f), offset.assign(count, 0.f);
  bool const has_middle = w.offset == nullptr && format == WeightFormat::kInteger;
  zero.assign(count, has_middle ? static_cast<float>(1 << (w.bits - 1)) : 0.f);
  zero_bytes.assign(count, kInEachByte << (w.bits - 1));
}

void PanelParameters::read(Weight const& w, int panel) {
  int const count = w.groups * kPanelRows;
  std::int64_t const first = static_cast<std::int64_t>(panel) * count;
  if (format_ == WeightFormat::kInteger) {
    read_row(w.scale, w.scale_dtype, first, count, scale.data());
  } else {
    auto* const read = format_ == WeightFormat::kMxfp4 ? read_e8m0 : read_packed_e4m3;
    auto const* bytes = static_cast<std::uint8_t const*>(w.scale) + first;
    if (!fours_.empty()) put_in_fours(bytes, count, fours_.data()), bytes = fours_.data();
    read(bytes, count, scale.data());
  }
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
