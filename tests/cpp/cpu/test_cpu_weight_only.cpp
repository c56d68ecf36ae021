// The CPU's arithmetic for registers of every width, whatever this machine's are, against sums in double.

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "check.h"
#include "cpu/w4a16/decode.h"
#include "cpu/w4a16/prefill.h"
#include "cpu/w4a16/prefill_amx.h"
#include "cpu/w4a16/prefill_avx512_bf16.h"
#include "packed_values.h"

using namespace epiloq;
using namespace epiloq::ops::weight_only_mm;

namespace {

// A panel of three tiles or six, of groups of 16, 32 or 64 columns, and tokens. Of integers or of E2M1 numbers.
struct Operands {
  static constexpr int kK = 192;
  int bits, group, tokens;
  bool is_fp4;
  std::vector<std::uint8_t> q = std::vector<std::uint8_t>(kK / depth(bits) * kLanes * lane_bytes(bits));
  std::vector<float> scale = std::vector<float>(kK / group * kPanelRows), zero = scale, offset = scale;
  std::vector<float> x = std::vector<float>(tokens * kK);

  Operands(int bits_, int group_, int tokens_, bool is_fp4_ = false)
      : bits(bits_), group(group_), tokens(tokens_), is_fp4(is_fp4_) {
    auto random = test::generator();
    auto const unit = [&] { return static_cast<float>(random() % 2000) / 1000.F - 1.F; };
    for (auto& byte : q) byte = static_cast<std::uint8_t>(random());
    for (auto& value : scale) value = unit();
    for (auto& value : zero) value = is_fp4 ? 0.F : static_cast<float>(random() % (1U << bits));
    for (auto& value : offset) value = is_fp4 ? 0.F : unit();
    for (auto& value : x) value = unit();
  }

  // A token's value as bfloat16.
  std::uint16_t cut_off(int at) {
    auto const upper = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x[at]) >> 16);
    x[at] = std::bit_cast<float>(std::uint32_t{upper} << 16);
    return upper;
  }

  PackedPanel panel() const {
    PackedPanel all;
    all.q = q.data(), all.scale = scale, all.zero = zero, all.offset = offset;
    for (float value : zero) all.zero_bytes.push_back(static_cast<std::uint64_t>(value) * 0x0101010101010101u);
    return all;
  }

  // [groups / 4, 16, 4]
  std::vector<float> scale_in_fours() const {
    std::vector<float> fours(scale.size());
    for (std::size_t i = 0; i < fours.size(); ++i) {
      std::size_t const four = i / (4 * kPanelRows), parameter = i / 4 % kPanelRows;
      fours[i] = scale[(4 * four + i % 4) * kPanelRows + parameter];
    }
    return fours;
  }

  std::vector<int> groups(int step) const {
    std::vector<int> at;
    for (int k = 0; k < kK; k += step) at.push_back(k / group * kPanelRows);
    return at;
  }

  void check_sums(Line const* sums, bool by_parameter) const {
    for (int m = 0; m < tokens; ++m) {
      std::vector<double> exact(kPanelRows), size(kPanelRows);
      for (int tile = 0, at = 0; tile < kK; tile += depth(bits)) {
        for (int lane = 0; lane < kLanes; ++lane, at += lane_bytes(bits)) {
          for (int i = 0; i < lane_values(bits); ++i) {
            TileCoord const coord = tile_coord_of(bits, lane, i);
            int const k = tile + coord.column, p = k / group * kPanelRows + parameter_of(coord.row);
            int const code = value_at(&q[at], bits, i);
            double const product = scale[p] * (is_fp4 ? kE2m1[code] : code - static_cast<double>(zero[p]));
            exact[coord.row] += (product + offset[p]) * x[m * kK + k];
            size[coord.row] += (std::abs(product) + std::abs(offset[p])) * std::abs(x[m * kK + k]);
          }
        }
      }
      for (int row = 0; row < kPanelRows; ++row) {
        float const got = sums[m].values[by_parameter ? parameter_of(row) : row];
        CHECK(std::abs(got - exact[row]) <= 2e-6 * size[row]);
      }
    }
  }
};

template <int kBits, class Values, int kTokens, int kLanesOf>
void multiply_few(Operands const& o) {
  std::vector<int> const groups = o.groups(kGrain);
  std::vector<float> const scale = Values::kInFours ? o.scale_in_fours() : o.scale;
  std::vector<Line> x(kTokens * Operands::kK / kWords), sums(kTokens);
  for (int m = 0; m < kTokens; ++m) {
    for (int i = 0; i < Operands::kK / kWords; ++i) {
      for (int word = 0; word < kWords; ++word) {
        int const byte = word % 4 * 4 + i % steps(kBits);
        int const column = tile_coord_of(kBits, word / 4, kBits == 4 ? 2 * byte : byte).column;
        x[i * kTokens + m].values[word] = o.x[m * Operands::kK + i / steps(kBits) * depth(kBits) + column];
      }
    }
  }
  SmallM<kBits, Values, kTokens, kLanesOf>::run({.q = o.q.data(),
                                                 .x = x[0].values,
                                                 .tiles = Operands::kK / depth(kBits),
                                                 .groups = groups.data(),
                                                 .scale = scale.data(),
                                                 .zero = o.zero.data(),
                                                 .offset = o.offset.data()},
                                                sums.data());
  o.check_sums(sums.data(), false);
}

template <int kBits, bool kHalves, int kTokens, int kLanesOf, template <int, bool, bool, int> class Values>
void few() {
  using Integers = Values<kBits, kHalves, false, kLanesOf>;
  multiply_few<kBits, Integers, kTokens, kLanesOf>(Operands(kBits, kHalves ? 32 : 64, kTokens));
}

template <int kTokens, int kLanesOf, template <int, bool, bool, int> class Values>
void few_of_fp4() {
  multiply_few<4, Values<4, true, true, kLanesOf>, kTokens, kLanesOf>(Operands(4, 32, kTokens, true));
  multiply_few<4, RowOf16<kLanesOf>, kTokens, kLanesOf>(Operands(4, 16, kTokens, true));
}

template <int kLanesOf>
void few_of_all_kinds() {
  few<4, false, 1, kLanesOf, Computed>();
  few<4, false, 2, kLanesOf, Computed>();
  few<4, false, 4, kLanesOf, Computed>();
  few<4, true, 1, kLanesOf, Computed>();
  few<4, true, 4, kLanesOf, Computed>();
  few<8, false, 1, kLanesOf, Computed>();
  few<8, false, 4, kLanesOf, Computed>();
  few_of_fp4<1, kLanesOf, Computed>();
  few_of_fp4<2, kLanesOf, Computed>();
  few_of_fp4<4, kLanesOf, Computed>();
}

// Bits, group size, and whether the numbers are E2M1.
struct Kind {
  int bits, group;
  bool is_fp4 = false;
};

template <int kLanesOf>
void many() {
  for (auto const [bits, group, is_fp4] : {Kind{4, 32}, {8, 32}, {4, 32, true}, {4, 16, true}}) {
    for (int tokens = 1; tokens < 14; ++tokens) {
      Operands const o(bits, group, tokens, is_fp4);
      std::vector<int> const groups = o.groups(1);
      std::vector<Line> sums(tokens);
      LargeM<kLanesOf>::run({.q = o.q.data(),
                             .bits = bits,
                             .k = Operands::kK,
                             .is_fp4 = is_fp4,
                             .groups = groups.data(),
                             .scale = o.scale.data(),
                             .zero = o.zero.data(),
                             .offset = o.offset.data(),
                             .x = o.x.data(),
                             .m = tokens,
                             .stride = Operands::kK},
                            sums.data());
      o.check_sums(sums.data(), true);
    }
  }
}

// Every value of 2 and 3 bits is at its row and column in the order of 4.
void narrow_codes_become_wide() {
  for (int bits : {2, 3}) {
    Operands const o(bits, 32, 1);
    std::vector<std::uint8_t> wide(Operands::kK * kPanelRows / 2);
    widen_codes(o.q.data(), bits, Operands::kK / depth(bits) * kLanes, wide.data());
    auto const values_of = [](std::vector<std::uint8_t> const& q, int bits) {
      std::vector<int> values(Operands::kK * kPanelRows);
      for (int tile = 0, at = 0; tile < Operands::kK; tile += depth(bits)) {
        for (int lane = 0; lane < kLanes; ++lane, at += lane_bytes(bits)) {
          for (int i = 0; i < lane_values(bits); ++i) {
            TileCoord const coord = tile_coord_of(bits, lane, i);
            values[coord.row * Operands::kK + tile + coord.column] = value_at(&q[at], bits, i);
          }
        }
      }
      return values;
    };
    CHECK(values_of(o.q, bits) == values_of(wide, 4));
  }
}

#ifdef EPILOQ_HAS_CLONES
// Tokens that bfloat16 holds, in their blocks; what lies beside them is not to be read.
void many_pairs() {
  for (auto const [bits, least, is_fp4] : {Kind{4, 32}, {8, 32}, {4, 16, true}}) {
    for (int tokens = 1; tokens < 2 * kPairBlock + 2; ++tokens) {
      Operands o(bits, tokens % 2 == 0 ? least : 2 * least, tokens, is_fp4);
      std::fill(o.offset.begin(), o.offset.end(), 0.F);
      constexpr int kPairs = Operands::kK / 2;
      std::vector<std::uint32_t> x((tokens + kPairBlock - 1) / kPairBlock * kPairBlock * kPairs, 0x7fc07fc0U);
      for (int m = 0; m < tokens; ++m) {
        for (int k = 0; k < Operands::kK; ++k) {
          std::uint32_t const upper = o.cut_off(m * Operands::kK + k);
          std::uint32_t& pair = x[(m / kPairBlock * kPairs + k / 2) * kPairBlock + m % kPairBlock];
          pair = k % 2 == 0 ? upper : pair | upper << 16;
        }
      }
      std::vector<int> const groups = o.groups(1);
      std::vector<Line> sums(tokens);
      LargeMPairs::run({.panel = {.q = o.q.data(),
                                  .bits = bits,
                                  .k = Operands::kK,
                                  .is_fp4 = is_fp4,
                                  .groups = groups.data(),
                                  .scale = o.scale.data(),
                                  .zero = o.zero.data(),
                                  .offset = nullptr,
                                  .x = nullptr,
                                  .m = tokens,
                                  .stride = 0},
                        .group = o.group,
                        .x = x.data()},
                       sums.data());
      o.check_sums(sums.data(), true);
    }
  }
}

// E2M1 numbers as lines of bfloat16, without their scales or, rounded, with them: what tiles multiply.
[[gnu::target("arch=x86-64-v4")]] void lines_of_fp4() {
  for (bool rounds : {false, true}) {
    Operands const o(4, 32, 1, true);
    PackedPanel const panel = o.panel();
    Weight weight{};
    weight.bits = 4;
    std::vector<int> const groups = o.groups(kOfLine);
    std::vector<Line> lines(Operands::kK / kOfLine * MultiplyInTiles::kRows);
    MultiplyInTiles::widen({weight, {&panel, &panel}, groups.data(), rounds, true}, 0, 0, Operands::kK, lines.data());
    std::vector<int> codes(kPanelRows * Operands::kK);
    for (int tile = 0, at = 0; tile < Operands::kK; tile += depth(4)) {
      for (int lane = 0; lane < kLanes; ++lane, at += lane_bytes(4)) {
        for (int i = 0; i < lane_values(4); ++i) {
          TileCoord const coord = tile_coord_of(4, lane, i);
          codes[coord.row * Operands::kK + tile + coord.column] = value_at(&o.q[at], 4, i);
        }
      }
    }
    auto const order = order_of_line(4);
    for (int line = 0; line < Operands::kK / kOfLine; ++line) {
      for (int row = 0; row < kPanelRows; ++row) {
        std::uint16_t found[kOfLine];
        std::memcpy(found, &lines[line * MultiplyInTiles::kRows + row], sizeof(found));
        for (int i = 0; i < kOfLine; ++i) {
          float const number = kE2m1[codes[row * Operands::kK + line * kOfLine + order[i]]];
          float const scale = rounds ? o.scale[line * kPanelRows + parameter_of(row)] : 1.F;
          float const as_float = std::bit_cast<float>(std::uint32_t{found[i]} << 16);
          CHECK(std::abs(as_float - number * scale) <= std::ldexp(std::abs(number * scale), rounds ? -8 : -30));
        }
      }
    }
  }
}

// Two panels by the same tokens, in tiles, of one part or of a value and what it is less than another.
void many_tiles() {
  for (int bits : {4, 8}) {
    for (int tokens : {1, 15, 16, 17, 32, 33, 48, 49, 64, 65, 97, 128, 150}) {
      int const group = tokens % 2 == 0 ? 32 : tokens % 3 == 0 ? 96 : 64, parts = 1 + tokens % 2;
      Operands o(bits, group, tokens), other(bits, group, tokens);
      std::fill(o.offset.begin(), o.offset.end(), 0.F), std::fill(other.offset.begin(), other.offset.end(), 0.F);
      TokenTiles const tiles{Operands::kK / kOfLine, tokens};
      std::vector<std::uint16_t> rows(parts * tiles.count() * 16 * Operands::kK);
      for (int i = 0; i < tokens * Operands::kK; ++i) {
        rows[i] = o.cut_off(i);
        // A half of it and a half.
        if (parts == 2) rows[i] = rows[i] == 0 ? 0 : rows[i] - 0x80, rows[rows.size() / 2 + i] = rows[i];
      }
      other.x = o.x;
      std::vector<Line> x(parts * tiles.size()), sums(tiles.count() * MultiplyInTiles::kRows + 1);
      for (int part = 0; part < parts; ++part) {
        for (int tile = 0; tile < tiles.count(); ++tile) {
          MultiplyInTiles::arrange(&rows[part * rows.size() / 2 + tile * 16 * Operands::kK], Operands::kK, bits, tiles,
                                   tile, x.data() + part * tiles.size());
        }
      }
      sums.back().values[0] = 7.F;
      Weight weight{};
      weight.n = 2 * kPanelRows, weight.k = weight.padded_k = Operands::kK;
      weight.bits = bits, weight.group = group, weight.groups = Operands::kK / group;
      PackedPanel const first = o.panel(), second = other.panel();
      std::vector<int> const groups = o.groups(kOfLine);
      MultiplyInTiles::run({weight, {&first, &second}, groups.data(), false, false}, {x.data(), tiles, parts}, 0,
                           tokens, sums.data());
      std::vector<Line> halves[2] = {std::vector<Line>(tokens), std::vector<Line>(tokens)};
      for (int m = 0; m < 2 * tokens; ++m) halves[m % 2][m / 2] = sums[m];
      o.check_sums(halves[0].data(), false), other.check_sums(halves[1].data(), false);
      CHECK(sums.back().values[0] == 7.F);
    }
  }
}
#endif

}  // namespace

int main() {
  few_of_all_kinds<4>();
  few_of_all_kinds<8>();
  few_of_all_kinds<16>();
#ifdef EPILOQ_HAS_CLONES
  few<4, false, 1, 16, LookedUp>();
  few<4, false, 4, 16, LookedUp>();
  few<4, true, 1, 16, LookedUp>();
  few<4, true, 2, 16, LookedUp>();
  few_of_fp4<1, 16, LookedUp>();
  few_of_fp4<4, 16, LookedUp>();
#endif
  narrow_codes_become_wide();
  many<4>();
  many<8>();
  many<16>();
#ifdef EPILOQ_HAS_CLONES
  if (has_pairs()) many_pairs();
  if (has_lookups()) lines_of_fp4();
  if (has_pair_tiles() && has_lookups()) many_tiles();
#endif
  return test::failures != 0;
}
