// W4A16 prefill with AMX: tokens packed into AMX tiles, weight panels two at a time.

#include "cpu/w4a16/prefill_amx.h"

#include "core/threads.h"
#include "cpu/common/rows.h"
#include "epiloq/batch_invariant.h"

namespace epiloq::ops::weight_only_mm {

namespace {

bool has_groups_of_lines(HostProblem const& p) {
  return has_pair_tiles() && has_lookups() && p.weight.group % kOfLine == 0;
}

}  // namespace

bool rounds_weights(HostProblem const& p, DType dtype) {
  bool const has_few_sums = p.weight.offset == nullptr && p.weight.group >= kWholePiece;
  return has_groups_of_lines(p) && dtype == DType::kBFloat16 && p.m > kMostUnrounded && !has_few_sums &&
         !batch_invariant();
}

bool by_tiles(HostProblem const& p, DType dtype) {
  return (has_groups_of_lines(p) && p.weight.offset == nullptr) || rounds_weights(p, dtype);
}

#ifdef EPILOQ_HAS_CLONES
namespace {

// Moves the upper halves of float32 values (8 significant bits) to `part` and leaves the remainder in `rest`; NaN and
// infinity move completely.
EPILOQ_CLONES void extract_part(float* rest, int count, std::uint16_t* part) {
  constexpr std::uint32_t kUpper = 0xffff0000u, kExponent = 0x7f800000u, kQuiet = 0x00400000u;
  for (int i = 0; i < count; ++i) {
    auto const bits = std::bit_cast<std::uint32_t>(rest[i]);
    bool const is_finite = (bits & kExponent) != kExponent, is_nan = (bits & ~(1u << 31)) > kExponent;
    std::uint32_t const upper = (bits & kUpper) | (is_nan ? kQuiet : 0u);
    part[i] = static_cast<std::uint16_t>(upper >> 16);
    rest[i] = is_finite ? rest[i] - std::bit_cast<float>(upper) : 0.f;
  }
}

// A token's parts, `of_part` values apart.
void extract_parts(HostProblem const& p, DType dtype, std::int64_t token, int parts, std::int64_t of_part,
                   std::vector<float>& rest, std::uint16_t* out) {
  int const k = p.weight.k;
  if (parts == 1) {
    std::memcpy(out, static_cast<std::uint16_t const*>(p.x) + token * p.stride_x, sizeof(std::uint16_t) * k);
    return;
  }
  read_row(p.x, dtype, token * p.stride_x, k, rest.data());
  for (int part = 0; part < parts; ++part) extract_part(rest.data(), k, out + part * of_part);
}

}  // namespace

TiledTokens::TiledTokens(HostProblem const& p, DType dtype, int threads)
    : tiles{p.weight.padded_k / kOfLine, p.m},
      parts(tile_parts(dtype)),
      x(parts * tiles.size()),
      groups(groups_of(p.weight, kOfLine)),
      rounds(rounds_weights(p, dtype)) {
  constexpr int kTokens = TokenTiles::kTokens;
  std::int64_t const stride = p.weight.padded_k, of_part = kTokens * stride;
  share(tiles.count(), threads, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> rest(p.weight.k);
    std::vector<std::uint16_t> rows(parts * of_part);
    for (auto tile = static_cast<int>(first); tile < last; ++tile) {
      int const count = std::min(kTokens, p.m - tile * kTokens);
      for (int i = 0; i < count; ++i) {
        std::int64_t const token = std::int64_t{tile} * kTokens + i;
        extract_parts(p, dtype, token, parts, of_part, rest, rows.data() + i * stride);
      }
      for (int part = 0; part < parts; ++part) {
        MultiplyInTiles::arrange(rows.data() + part * of_part, stride, read_bits(p.weight.bits), tiles, tile,
                                 x.data() + part * tiles.size());
      }
    }
  });
}

void multiply_tiles(HostProblem const& p, TiledTokens const& tokens, PackedPanel const* panels, int how_many, int first,
                    int count, Line* sums) {
  MultiplyInTiles::run({.weight = p.weight,
                        .panels = {panels, panels + how_many - 1},  // or the last one again
                        .groups = tokens.groups.data(),
                        .rounds = tokens.rounds,
                        .is_fp4 = p.is_fp4()},
                       {tokens.x.data(), tokens.tiles, tokens.parts}, first / TokenTiles::kTokens, count, sums);
}
#else
TiledTokens::TiledTokens(HostProblem const&, DType, int) {}
void multiply_tiles(HostProblem const&, TiledTokens const&, PackedPanel const*, int, int, int, Line*) {}
#endif

}  // namespace epiloq::ops::weight_only_mm
