// The arithmetic of online_quant_mm's kernels without a GPU, for every tile: each byte of a stage is copied once, to a
// place of its own; shared memory is read and written without bank conflicts; and the fragments that lanes load are
// those of which m8n8k16, as PTX defines it, makes the product.

#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "check.h"
#include "dispatch/online_quant_mm/tables.h"
#include "kernels/common/online_quant_layout.h"

namespace gemm = epiloq::gemm;
namespace online = epiloq::ops::online_quant_mm;

namespace {

constexpr int kLanes = 32, kRowsOfAll = 1000, kPadded = 1000, kSteps = 3, kRow = 128 * kSteps;

// Eight lanes at a time, 16 bytes each: all 32 banks.
template <class At>
void all_banks(int lanes, At at) {
  for (int first = 0; first < lanes; first += 8) {
    std::set<int> banks;
    for (int i = 0; i < 8; ++i) banks.insert(at(first + i) / 16 % 8);
    CHECK_EQUAL(banks.size(), 8u);
  }
}

template <class Operand, int kTileRows, int kRowBytes>
void values_are_copied_once(Operand const& operand, int step) {
  std::set<int> places;
  for (int i = 0; i < Operand::kValues; ++i) {
    for (int thread = 0; thread < Operand::kThreads; ++thread) {
      gemm::OnlineQuantChunk const chunk = operand.value(0, i, thread, step);
      int const row = i * Operand::kRowsAtOnce + thread / Operand::kChunks, column = thread % Operand::kChunks;
      places.insert(chunk.to);
      CHECK_EQUAL(static_cast<int>(chunk.to), Operand::swizzled_offset(row, column));
      CHECK_EQUAL(chunk.inside, operand.first + row < operand.rows);
      auto const from = static_cast<std::int8_t const*>(chunk.source) - operand.values;
      std::int64_t const source_row = chunk.inside ? operand.first + row : 0;
      CHECK_EQUAL(from, source_row * operand.stride + step * kRowBytes + 16 * column);
    }
    all_banks(Operand::kThreads, [&](int thread) { return operand.value(0, i, thread, step).to; });
  }
  CHECK_EQUAL(static_cast<int>(places.size()), kTileRows * kRowBytes / 16);
  CHECK(*places.rbegin() == Operand::kValueBytes - 16 && *places.begin() == 0);
}

template <class Operand, int kTileRows, int kBlocks>
void parameters_are_copied_once(Operand const& operand, int step) {
  std::set<int> places;
  CHECK(operand.parameter_count() <= Operand::kParameters * Operand::kThreads);
  for (int i = 0; i < operand.parameter_count(); ++i) {
    gemm::OnlineQuantChunk const chunk = operand.parameter(0, i, step);
    int const offset = chunk.to / 4, row = offset % kTileRows, kind = offset / kTileRows % 3,
              block = offset / kTileRows / 3;
    places.insert(chunk.to);
    CHECK(kind < operand.kinds && block < kBlocks && chunk.to % 16 == 0);
    CHECK_EQUAL(offset, Operand::parameters_of(block, kind) + row);
    CHECK_EQUAL(chunk.inside, operand.first + row < operand.padded_rows);
    std::int64_t const line = (step * kBlocks + block) * operand.source_kinds + kind;
    std::int64_t const source_row = chunk.inside ? operand.first + row : 0;
    CHECK_EQUAL(static_cast<float const*>(chunk.source) - operand.parameters, line * operand.padded_rows + source_row);
  }
  CHECK_EQUAL(static_cast<int>(places.size()), kBlocks * operand.kinds * kTileRows / 4);
}

template <int kThreads, int kTileRows, int kRowBytes, int kBlocks>
void is_copied_once() {
  using Operand = gemm::OnlineQuantOperand<kThreads, kTileRows, kRowBytes, kBlocks>;
  static std::vector<std::int8_t> const values(kRowsOfAll * kRow);
  static std::vector<float> const parameters(kSteps * kBlocks * 3 * kPadded);
  for (int kinds : {2, 3}) {
    for (int first : {0, 960 / kTileRows * kTileRows}) {  // the last tile is ragged, or ends with the rows
      Operand const operand{values.data(), kSteps * kRowBytes, first, kRowsOfAll - 4, parameters.data(), kinds,
                            kinds,         kPadded - 4};
      values_are_copied_once<Operand, kTileRows, kRowBytes>(operand, kSteps - 1);
      parameters_are_copied_once<Operand, kTileRows, kBlocks>(operand, kSteps - 1);
    }
  }
}

template <auto const& kTable, std::size_t... kRows>
void every_tile_is_copied_once(std::index_sequence<kRows...>) {
  auto const tile = []<std::size_t kIndex, int kGroup>() {
    constexpr auto c = kTable[kIndex];
    constexpr int kThreads = 32 * c.warps_m * c.warps_n, kBlocks = 128 / kGroup;
    is_copied_once<kThreads, c.tile_m(), 128, kBlocks>();
    is_copied_once<kThreads, c.tile_n(), 128, kBlocks>();
    is_copied_once<kThreads, c.tile_n(), 64, kBlocks>();
  };
  (tile.template operator()<kRows, 32>(), ...);
  (tile.template operator()<kRows, 64>(), ...);
  (tile.template operator()<kRows, 128>(), ...);
}

// A stage's rows in shared memory, and four 8 x 16-byte matrices of it as ldmatrix deals them out: a lane gets 4 bytes.
using Bytes = std::vector<std::int8_t>;
using Word = std::array<std::int8_t, 4>;
using Lanes = std::array<std::array<Word, 4>, kLanes>;

template <class At>
Lanes ldmatrix_x4(Bytes const& shared, At at) {
  all_banks(kLanes, at);
  Lanes result;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::copy_n(shared.begin() + at(8 * matrix + lane / 4) + 4 * (lane % 4), 4, result[lane][matrix].begin());
    }
  }
  return result;
}

// PTX, mma.m8n8k16 of .s8: a lane holds row lane / 4 of A and column lane / 4 of B, both 4 (lane % 4) to + 3 of K, and
// of D row lane / 4, columns 2 (lane % 4) and + 1.
template <class A, class B>
void multiply(std::array<std::array<int, 8>, 8>& d, A a, B b) {
  for (int row = 0; row < 8; ++row) {
    for (int column = 0; column < 8; ++column) {
      for (int k = 0; k < 16; ++k) d[row][column] += a(4 * row + k / 4)[k % 4] * b(4 * column + k / 4)[k % 4];
    }
  }
}

constexpr int kHigh = -16;  // the upper half of a byte
Word low_halves(Word word) {
  for (auto& byte : word) byte = static_cast<std::int8_t>(byte * 16);
  return word;
}
Word high_halves(Word word) {
  for (auto& byte : word) byte = static_cast<std::int8_t>(byte & kHigh);
  return word;
}

// 16 rows by 16 columns of 32 values at `depth`, from the fragments of four m8n8k16 a half of the columns.
template <int kBits>
void fragments_make_the_product(int depth, bool twice) {
  using A = gemm::OnlineQuantOperand<32, 16, 128, 1>;
  using B = gemm::OnlineQuantOperand<32, 16, 16 * kBits, 1>;
  static std::mt19937 random = test::generator();
  auto const draw = [](int lo, int hi) {
    return static_cast<std::int8_t>(std::uniform_int_distribution(lo, hi)(random));
  };
  Bytes shared_a(16 * 128), shared_b(16 * 16 * kBits);
  std::array<std::array<int, 32>, 16> a, b;
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 32; ++k) {
      shared_a[A::swizzled_offset(row, 2 * depth + k / 16) + k % 16] = a[row][k] = draw(-128, 127);
      b[row][k] = kBits == 8 ? draw(-128, 127) : draw(-8, 7);
      if (kBits == 8) shared_b[B::swizzled_offset(row, 2 * depth + k / 16) + k % 16] = b[row][k];
      if (kBits == 4) shared_b[B::swizzled_offset(row, depth) + k % 16] |= (b[row][k] & 15) << (k < 16 ? 0 : 4);
    }
  }
  int const first = twice ? depth : depth / 2 * 2, skipped = depth - first;  // of 4 bits, depths come in pairs
  Lanes const of_a = ldmatrix_x4(shared_a, [&](int lane) {
    auto const [row, chunk] = gemm::ldmatrix_row_a(lane, depth);
    return A::swizzled_offset(row, chunk);
  });
  Lanes const of_b = ldmatrix_x4(shared_b, [&](int lane) {
    auto const [row, chunk] =
        kBits == 8 ? gemm::ldmatrix_row_b(lane, depth) : gemm::ldmatrix_row_b4(lane, first, twice);
    return B::swizzled_offset(row, chunk);
  });
  for (int rows = 0; rows < 2; ++rows) {
    for (int columns = 0; columns < 2; ++columns) {
      std::array<std::array<int, 8>, 8> d{};
      for (int half = 0; half < 2; ++half) {
        auto const word_of_b = [&](int lane) {
          if (kBits == 8) return of_b[lane][2 * columns + half];
          Word const word = of_b[lane][2 * columns + skipped];
          return half == 0 ? low_halves(word) : high_halves(word);
        };
        multiply(d, [&](int lane) { return of_a[lane][2 * half + rows]; }, word_of_b);
      }
      for (int m = 0; m < 8; ++m) {
        for (int n = 0; n < 8; ++n) {
          int expected = 0;
          for (int k = 0; k < 32; ++k) expected += a[8 * rows + m][k] * b[8 * columns + n][k];
          CHECK_EQUAL(d[m][n], kBits == 8 ? expected : 16 * expected);
        }
      }
    }
  }
}

}  // namespace

int main() {
  every_tile_is_copied_once<online::kSm75Tiles>(std::make_index_sequence<online::kSm75Tiles.size()>{});
  every_tile_is_copied_once<online::kTiles>(std::make_index_sequence<online::kTiles.size()>{});
  for (int depth = 0; depth < 4; ++depth) {
    fragments_make_the_product<8>(depth, false);
    fragments_make_the_product<4>(depth, false);
    fragments_make_the_product<4>(depth, true);
  }
  return test::failures != 0;
}
