// Products of many tokens, or with any weight, on the CPU: the versions of host_many.h, and tokens for host_pairs.h.

#include "ops/weight_only_mm/host_many.h"

#include <bit>

#include "core/host_versions.h"
#include "core/threads.h"
#include "ops/weight_only_mm/host.h"
#include "ops/weight_only_mm/host_pairs.h"

namespace epiloq::ops::weight_only_mm {

namespace {

#ifdef EPILOQ_HAS_CLONES
void multiply_pairs(SlabByTokens const& slab, int group, ManyTokens const& all, int first, Line* sums) {
  std::uint32_t const* const x = all.pairs.data() + first * all.stride;
  if (all.in_tiles) {
    TokensOfTiles const tokens{reinterpret_cast<std::uint16_t const*>(x), 2 * slab.stride, slab.m, all.parts,
                               2 * all.of_part};
    ManyPairs::run_in_tiles(slab, group, tokens, sums);
  } else {
    ManyPairs::run({.slab = slab, .group = group, .x = x}, sums);
  }
}
#else
void multiply_pairs(SlabByTokens const&, int, ManyTokens const&, int, Line*) {}
#endif

// The upper halves of float32 values, whose rest is left: eight bits of each, what is not finite whole.
EPILOQ_CLONES void take_part(float* rest, int count, std::uint16_t* part) {
  constexpr std::uint32_t kUpper = 0xffff0000u, kExponent = 0x7f800000u, kQuiet = 0x00400000u;
  for (int i = 0; i < count; ++i) {
    auto const bits = std::bit_cast<std::uint32_t>(rest[i]);
    bool const is_finite = (bits & kExponent) != kExponent, is_nan = (bits & ~(1u << 31)) > kExponent;
    std::uint32_t const upper = (bits & kUpper) | (is_nan ? kQuiet : 0u);
    part[i] = static_cast<std::uint16_t>(upper >> 16);
    rest[i] = is_finite ? rest[i] - std::bit_cast<float>(upper) : 0.f;
  }
}

// A token of a block; of an odd K a zero follows.
void in_pairs(std::uint16_t const* row, int k, std::uint32_t* out) {
  for (int i = 0; i + 1 < k; i += 2, out += kPairBlock) *out = row[i] | std::uint32_t{row[i + 1]} << 16;
  if (k % 2 != 0) *out = row[k - 1];
}

}  // namespace

bool by_pairs(Problem const& p, DType dtype) {
  return has_pairs() && dtype == DType::kBFloat16 && p.weight.offset == nullptr && p.weight.group % 2 == 0;
}

bool by_tiles(Problem const& p, DType dtype) {
  bool const has_tiles = has_pair_tiles() && (dtype != DType::kBFloat16 || has_pairs());
  return has_tiles && p.weight.offset == nullptr && p.weight.group % kTileColumns == 0 && p.m >= kTileRows;
}

ManyTokens::ManyTokens(Problem const& p, DType dtype, int threads)
    : groups(groups_of(p.weight, 1)), x(static_cast<float const*>(p.x)), stride(p.stride_x) {
  int const k = p.weight.k;
  if (by_tiles(p, dtype)) {
    bring_into_tiles(p, dtype, threads);
  } else if (by_pairs(p, dtype)) {
    auto const* const rows = static_cast<std::uint16_t const*>(p.x);
    stride = (k + 1) / 2;  // pairs
    pairs.resize((p.m + kPairBlock - 1) / kPairBlock * kPairBlock * stride);
    share(p.m, threads, [&](int first, int last) {
      for (int m = first; m < last; ++m)
        in_pairs(rows + m * p.stride_x, k, pairs.data() + m / kPairBlock * kPairBlock * stride + m % kPairBlock);
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

void ManyTokens::bring_into_tiles(Problem const& p, DType dtype, int threads) {
  int const k = p.weight.k;
  in_tiles = true, parts = tile_parts(dtype);
  stride = apart_in_cache(std::int64_t{2} * k) / sizeof(std::uint32_t);
  of_part = (p.m + kTileRows - 1) / kTileRows * kTileRows * stride;
  pairs.resize(parts * of_part);
  share(p.m, threads, [&](int first, int last) {
    std::vector<float> rest(k);
    std::vector<std::uint16_t> part_of_row(k);
    for (int m = first; m < last; ++m) {
      std::uint32_t* const row = pairs.data() + m * stride;
      if (parts == 1) {
        std::memcpy(row, static_cast<std::uint16_t const*>(p.x) + m * p.stride_x, sizeof(std::uint16_t) * k);
        continue;
      }
      read_row(p.x, dtype, m * p.stride_x, k, rest.data());
      for (int part = 0; part < parts; ++part) {
        take_part(rest.data(), k, part_of_row.data());
        std::memcpy(row + part * of_part, part_of_row.data(), sizeof(std::uint16_t) * k);
      }
    }
  });
}

void multiply_many(Problem const& p, ManyTokens const& tokens, SlabParameters const& parameters, int slab, int first,
                   int count, Line* sums) {
  static auto const multiply = Versions<Many, SlabByTokens const&, Line*>::here();
  Weight const& w = p.weight;
  std::fill_n(sums, count, Line{});
  SlabByTokens const of_slab{.q = w.q + slab * slab_bytes(w),
                             .bits = w.bits,
                             .k = w.k,
                             .groups = tokens.groups.data(),
                             .scale = parameters.scale.data(),
                             .zero = parameters.zero.data(),
                             .offset = parameters.offset.data(),
                             .x = tokens.x + first * tokens.stride,
                             .m = count,
                             .stride = tokens.stride};
  if (tokens.pairs.empty()) {
    multiply(of_slab, sums);
  } else {
    multiply_pairs(of_slab, w.group, tokens, first, sums);
  }
  for (int m = 0; m < count; ++m) {
    Line const by_parameter = sums[m];
    for (int i = 0; i < kSlab; ++i) sums[m].values[i] = by_parameter.values[parameter_of(i)];
  }
}

}  // namespace epiloq::ops::weight_only_mm
