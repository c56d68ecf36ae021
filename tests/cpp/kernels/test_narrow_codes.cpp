// The order of 2-bit and 3-bit values, and what kernels and the dequantiser make of it, by their definition in
// packed_layout.h.

#include <array>
#include <cstring>
#include <vector>

#include "check.h"
#include "packed_values.h"
#include "problems/narrow_codes.h"
#include "problems/packed_layout.h"

namespace wo = epiloq::ops::weight_only_mm;

namespace {

constexpr int kValues = 32, kBlocks = 2;  // of a lane

template <int kBits>
using Lane = std::array<std::uint32_t, kBits>;

template <int kBits>
std::vector<int> values_of(Lane<kBits> const& lane) {
  std::uint8_t bytes[sizeof lane];
  std::memcpy(bytes, lane.data(), sizeof lane);
  std::vector<int> values;
  for (int i = 0; i < kValues; ++i) values.push_back(wo::value_at(bytes, kBits, i));
  return values;
}

// A value each: flipping a bit changes one.
template <int kBits>
void every_bit_is_of_one_value(Lane<kBits> lane) {
  std::vector<int> const before = values_of<kBits>(lane);
  for (int bit = 0; bit < 32 * kBits; ++bit) {
    lane[bit / 32] ^= 1u << bit % 32;
    std::vector<int> const after = values_of<kBits>(lane);
    int changed = 0, difference = 0;
    for (int i = 0; i < kValues; ++i) {
      changed += before[i] != after[i];
      difference |= before[i] ^ after[i];
    }
    CHECK_EQUAL(changed, 1);
    CHECK((difference & (difference - 1)) == 0 && difference < 1 << kBits);
    lane[bit / 32] ^= 1u << bit % 32;
  }
}

// Register p of fragment f holds columns 2 t and 2 t + 1, from 8 on for p >= 2, of row g, or g + 8 for odd p.
template <int kBits>
void patterns_are_fragments(Lane<kBits> const& lane, int at_lane) {
  std::vector<int> const values = values_of<kBits>(lane);
  for (int b = 0; b < kBlocks; ++b) {
    std::uint32_t block[wo::narrow::block_words(kBits)];
    wo::narrow::take_block<kBits>(block, lane.data(), b);
    for (int pair = 0; pair < wo::narrow::kPairs; ++pair) {
      std::uint32_t const found = wo::narrow::pattern(kBits, block, pair);
      int const position = wo::narrow::field_of(kBits, pair).position, f = pair / 4, p = pair % 4;
      for (int e = 0; e < 2; ++e) {
        int const i = 16 * b + 2 * pair + e;
        std::uint32_t const half = found >> 16 * e & 0xffff;
        CHECK_EQUAL(half, static_cast<std::uint32_t>(values[i]) << position);
        CHECK(half < 256);
        auto const place = wo::tile_coord_of(kBits, at_lane, i);
        CHECK_EQUAL(place.row, at_lane / 4 + p % 2 * 8);
        CHECK_EQUAL(place.column, 32 * b + 16 * f + p / 2 * 8 + at_lane % 4 * 2 + e);
      }
    }
  }
}

// Widened words are a lane of 4 bits: the same values at the same places.
template <int kBits>
void widened_words_are_four_bits(Lane<kBits> const& lane) {
  std::uint32_t words[4];
  for (int i = 0; i < 4; ++i) {
    std::uint32_t block[wo::narrow::block_words(kBits)];
    wo::narrow::take_block<kBits>(block, lane.data(), i / 2);
    words[i] = wo::narrow::widened<kBits>(block, i % 2);
  }
  std::uint8_t bytes[sizeof words];
  std::memcpy(bytes, words, sizeof words);
  std::vector<int> const values = values_of<kBits>(lane);
  int found = 0;
  for (int i = 0; i < kValues; ++i) {
    auto const wide = wo::tile_coord_of(4, 0, i);
    for (int j = 0; j < kValues; ++j) {
      auto const narrow = wo::tile_coord_of(kBits, 0, j);
      if (narrow.row != wide.row || narrow.column != wide.column) continue;
      CHECK_EQUAL(wo::value_at(bytes, 4, i), values[j]);
      ++found;
    }
  }
  CHECK_EQUAL(found, kValues);
}

template <int kBits>
void check_bits(std::mt19937& random) {
  for (int repeat = 0; repeat < 64; ++repeat) {
    Lane<kBits> lane;
    for (auto& word : lane) word = static_cast<std::uint32_t>(random());
    every_bit_is_of_one_value<kBits>(lane);
    patterns_are_fragments<kBits>(lane, static_cast<int>(random() % wo::kLanes));
    widened_words_are_four_bits<kBits>(lane);
  }
}

}  // namespace

int main() {
  auto random = test::generator();
  check_bits<2>(random);
  check_bits<3>(random);
  return test::failures != 0;
}
