// The CPU's panel of a weight by quantised tokens, with the instructions of every machine that this one can be, against
// integers and sums that floats hold exactly.

#include <vector>

#include "check.h"
#include "cpu/online_quant/online_quant_amx.h"

using namespace epiloq;
using namespace epiloq::ops::online_quant_mm;

namespace {

constexpr int kMostRows = 32, kPoison = 0x5a5a5a5a;

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

struct Operands {
  int bits, k, group, rows, tokens;
  int blocks = round_up(k, group) / group, padded = round_up(k, 128);
  std::vector<int> w = std::vector<int>(rows * k), x = std::vector<int>(tokens * k);
  std::vector<std::int8_t> values = std::vector<std::int8_t>(rows * padded * bits / 8);
  std::vector<float> parameters = std::vector<float>(blocks * 3 * kMostRows);
  std::vector<TokenBlock> token_blocks = std::vector<TokenBlock>(tokens * blocks);

  Operands(std::mt19937& random, int bits_, int k_, int group_, int rows_, int tokens_)
      : bits(bits_), k(k_), group(group_), rows(rows_), tokens(tokens_) {
    for (int i = 0; i < rows * k; ++i) {
      w[i] = static_cast<int>(random() % (1U << bits)) - (1 << (bits - 1));
      int const row = i / k, column = i % k;
      if (bits == 8) {
        values[row * padded + column] = static_cast<std::int8_t>(w[i]);
      } else {
        values[row * padded / 2 + column / 32 * 16 + column % 16] |=
            static_cast<std::int8_t>((w[i] & 15) << (column % 32 < 16 ? 0 : 4));
      }
    }
    for (auto& value : x) value = static_cast<int>(random() % 256) - 128;
    // Powers of two and small integers: every sum is exact, in any order.
    auto const power = [&] { return 1.F / static_cast<float>(1U << random() % 4); };
    auto const integer = [&] { return static_cast<float>(random() % 16) - 8.F; };
    for (int i = 0; i < blocks * 3 * kMostRows; ++i) parameters[i] = i / kMostRows % 3 == 0 ? power() : integer();
    for (int i = 0; i < tokens * blocks; ++i) {
      int sum = 0;
      int const m = i / blocks, first = i % blocks * group;
      for (int column = first; column < std::min(first + group, k); ++column) sum += x[m * k + column];
      token_blocks[i] = {power(), integer(), integer(), -zero_of(bits) * sum};
    }
  }

  double exact(int m, int row) const {
    double total = 0;
    for (int block = 0; block < blocks; ++block) {
      std::int64_t product = 0;
      for (int i = block * group; i < std::min((block + 1) * group, k); ++i) product += x[m * k + i] * w[row * k + i];
      TokenBlock const& token = token_blocks[m * blocks + block];
      float const* const p = &parameters[block * 3 * kMostRows + row];
      total += static_cast<double>(product) * p[0] * token.scale + p[2 * kMostRows] * token.scaled_sum +
               p[kMostRows] * token.offset;
    }
    return total;
  }
};

template <class Bytes>
void check_panel(Operands const& o) {
  constexpr int kRows = Bytes::kRows;
  int const rows = std::min(o.rows, kRows);
  std::vector<float> parameters(o.blocks * 3 * kRows);
  for (int i = 0; i < o.blocks * 3; ++i) std::copy_n(&o.parameters[i * kMostRows], kRows, &parameters[i * kRows]);
  PanelByTokens s{.values = o.values.data(),
                  .stride = o.padded * o.bits / 8,
                  .rows = rows,
                  .bits = o.bits,
                  .k = o.k,
                  .group = o.group,
                  .blocks = o.blocks,
                  .parameters = parameters.data(),
                  .x = nullptr,
                  .tokens = o.token_blocks.data(),
                  .m = o.tokens,
                  .words = nullptr};
  std::vector<std::int32_t> x(o.tokens * o.blocks * s.group_words() * Bytes::kWords);
  for (int i = 0; i < o.tokens * o.blocks; ++i) {
    int const m = i / o.blocks, first = i % o.blocks * o.group, count = std::min(o.group, o.k - first);
    std::vector<std::int8_t> const block(&o.x[m * o.k + first], &o.x[m * o.k + first] + count);
    in_words<Bytes::kWords>(block.data(), count, &x[i * s.group_words() * Bytes::kWords]);
  }
  std::vector<typename BytePanel<Bytes>::Column> words(s.columns());
  for (auto& column : words) std::fill_n(column.values, kRows, kPoison);  // what nothing may count
  std::vector<float> sums(o.tokens * kRows);
  s.x = x.data(), s.words = words.data();
  ByteVersions<MultiplyPanel, PanelByTokens const&, float*>::of(Bytes{})(s, sums.data());
  for (int m = 0; m < o.tokens; ++m) {
    for (int row = 0; row < rows; ++row) CHECK_EQUAL(sums[m * kRows + row], static_cast<float>(o.exact(m, row)));
  }
}

#ifdef EPILOQ_HAS_CLONES
void check_tiles(Operands const& o) {
  TokenTiles const tiles{o.blocks * o.group / columns_of_line(o.group), o.tokens};
  int const up_to = tiles.count() * TokenTiles::kTokens, stride = o.blocks * o.group;
  std::vector<std::int8_t> rows(up_to * stride);
  std::vector<float> parameters(o.blocks * 3 * up_to, static_cast<float>(kPoison));
  for (int m = 0; m < o.tokens; ++m) {
    for (int i = 0; i < o.k; ++i) rows[m * stride + i] = static_cast<std::int8_t>(o.x[m * o.k + i]);
    for (int block = 0; block < o.blocks; ++block) {
      TokenBlock const& token = o.token_blocks[m * o.blocks + block];
      float const values[] = {token.scale, token.offset, token.scaled_sum};
      for (int kind = 0; kind < 3; ++kind) parameters[(block * 3 + kind) * up_to + m] = values[kind];
    }
  }
  std::vector<Line> x(tiles.size()), sums(tiles.count() * MultiplyBlocksInTiles::kRows);
  for (int tile = 0; tile < tiles.count(); ++tile) {
    MultiplyBlocksInTiles::arrange(&rows[tile * TokenTiles::kTokens * stride], stride, o.group, tiles, tile, x.data());
  }
  MultiplyBlocksInTiles::run({.values = o.values.data(),
                              .stride = o.padded * o.bits / 8,
                              .rows = o.rows,
                              .bits = o.bits,
                              .k = o.k,
                              .group = o.group,
                              .parameters = o.parameters.data()},
                             {x.data(), tiles, parameters.data()}, 0, o.tokens, sums.data());
  auto const* const found = reinterpret_cast<float const*>(sums.data());
  for (int m = 0; m < o.tokens; ++m) {
    for (int row = 0; row < o.rows; ++row) {
      CHECK_EQUAL(found[m * kMostRows + row], static_cast<float>(o.exact(m, row)));
    }
  }
}
#endif

void every_machine(Operands const& o) {
  check_panel<PlainBytes>(o);
#ifdef EPILOQ_HAS_CLONES
  if (__builtin_cpu_supports("x86-64-v3")) check_panel<PairedBytes>(o);
  if (__builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vnni")) check_panel<VnniBytes>(o);
  if (MultiplyBlocksInTiles::supports(MultiplyBlocksInTiles::kFewest, o.group)) check_tiles(o);
#endif
}

void sums_are_exact() {
  auto random = test::generator();
  int const groups[] = {1, 3, 4, 7, 32, 64, 96, 100, 128, 160, 256, 384, 512};
  for (int bits : {4, 8}) {
    for (int group : groups) {
      for (int tokens : {1, 4, 7, 10, 13, 16, 19, 32, 45}) {
        int const k = 1 + static_cast<int>(random() % 500), rows = 1 + static_cast<int>(random() % kMostRows);
        every_machine(Operands(random, bits, k, group, rows, tokens));
      }
    }
    every_machine(Operands(random, bits, 512, 128, kMostRows, 8));
  }
}

// The largest sums of either sign that a block may have: they pass 32 bits on the way.
void the_longest_block(int group, int tokens) {
  auto random = test::generator();
  for (int x : {-128, 127}) {
    Operands o(random, 8, group, group, 2, tokens);
    std::fill(o.token_blocks.begin(), o.token_blocks.end(), TokenBlock{1.F, 0.F, 0.F, -128 * x * o.k});
    std::fill(o.x.begin(), o.x.end(), x);
    for (int i = 0; i < o.k; ++i) o.w[i] = o.values[i] = -128, o.w[o.k + i] = o.values[o.padded + i] = 127;
    for (int kind = 0; kind < 3; ++kind) std::fill_n(&o.parameters[kind * kMostRows], kMostRows, kind == 0 ? 1.F : 0.F);
    every_machine(o);
  }
}

}  // namespace

int main() {
  sums_are_exact();
  the_longest_block((1 << 17) - 1, 1);
  the_longest_block((1 << 17) - 128, 17);
  the_longest_block(512, 17);  // in tiles
  return test::failures != 0;
}
