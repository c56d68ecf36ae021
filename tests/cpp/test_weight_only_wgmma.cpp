// The wgmma kernel without a GPU: every weight reaches the place of the fragments that the instruction reads, across
// TMA's swizzle; shared memory is read without bank conflicts; stages are aligned and fit.

#include <array>
#include <set>
#include <vector>

#include "check.h"
#include "ops/weight_only_mm/wgmma_layout.h"

namespace wo = epiloq::ops::weight_only_mm;

namespace {

struct Value {
  int row = -1, column = -1;
  bool operator==(Value const&) const = default;
};
using Byte = std::array<Value, 2>;  // of 8 bits, the first
using Word = std::array<Byte, 4>;

// A slab's step of 128 columns as TMA leaves it in shared memory.
std::vector<Byte> swizzled_slab(int bits) {
  std::vector<Byte> memory(wo::slab_bytes(bits));
  std::vector<int> written(memory.size());
  for (int tile = 0; tile < wo::kPadding / wo::depth(bits); ++tile) {
    for (int lane = 0; lane < wo::kLanes; ++lane) {
      for (int i = 0; i < wo::lane_values(bits); ++i) {
        wo::Place const place = wo::place_of(bits, lane, i);
        int const byte = tile * wo::tile_bytes(bits) + lane * wo::lane_bytes(bits) + i * bits / 8;
        memory[wo::swizzled(byte)][bits == 4 ? i % 2 : 0] = {place.row, tile * wo::depth(bits) + place.column};
        ++written[wo::swizzled(byte)];
      }
    }
  }
  for (int count : written) CHECK_EQUAL(count, 8 / bits);
  return memory;
}

Word word_at(std::vector<Byte> const& memory, int at) {
  CHECK(at % 4 == 0 && at >= 0 && at + 4 <= static_cast<int>(memory.size()));
  return {memory[at], memory[at + 1], memory[at + 2], memory[at + 3]};
}

// What slot `half` of register `reg` of a lane's fragment of wgmma's first operand is to hold.
Value expected(int lane, int piece, int fragment, int reg, int half) {
  return {lane / 4 + 8 * (reg % 2),
          piece * wo::kPiece + fragment * wo::kInstruction + 8 * (reg / 2) + 2 * (lane % 4) + half};
}

// As __byte_perm.
Word permuted(Word const& a, Word const& b, unsigned selector) {
  Word result;
  for (int i = 0; i < 4; ++i) {
    unsigned const from = selector >> 4 * i & 7;
    result[i] = from < 4 ? a[from] : b[from - 4];
  }
  return result;
}

void nibbles_reach_their_slots() {
  auto const memory = swizzled_slab(4);
  for (int lane = 0; lane < wo::kLanes; ++lane) {
    for (int piece = 0; piece < 4; ++piece) {
      Word words[4];
      for (int unit = 0; unit < 4; ++unit)
        words[unit] = word_at(memory, wo::word_at(wo::first_word_at(lane), piece, unit));
      for (int fragment = 0; fragment < 2; ++fragment) {
        Word const word = permuted(words[2 * fragment], words[2 * fragment + 1], wo::bytes_of_lane(lane));
        for (int reg = 0; reg < 4; ++reg) {
          for (int half = 0; half < 2; ++half) {  // (word >> 4 reg) & 0x000f000f
            int const nibble = reg + 4 * half;
            CHECK(word[nibble / 2][nibble % 2] == expected(lane, piece, fragment, reg, half));
          }
        }
      }
    }
  }
}

void bytes_reach_their_slots() {
  auto const memory = swizzled_slab(8);
  for (int lane = 0; lane < wo::kLanes; ++lane) {
    for (int piece = 0; piece < 4; ++piece) {
      for (int fragment = 0; fragment < 2; ++fragment) {
        for (int reg = 0; reg < 4; ++reg) {
          // ldmatrix: word lane % 4 of row lane / 4, which the lane of that row and matrix names.
          int const matrix = 2 * fragment + reg / 2, named_by = matrix * 8 + lane / 4;
          int const at = wo::row_at(wo::first_row_at(named_by), piece);
          CHECK_EQUAL(at % 16, 0);
          Word const word = word_at(memory, at + lane % 4 * 4);
          for (int half = 0; half < 2; ++half)
            CHECK(word[reg % 2 * 2 + half][0] == expected(lane, piece, fragment, reg, half));
        }
      }
    }
  }
}

void banks_do_not_conflict() {
  for (int piece = 0; piece < 4; ++piece) {
    for (int unit = 0; unit < 4; ++unit) {
      std::set<int> words, banks;
      for (int lane = 0; lane < wo::kLanes; ++lane) {
        int const word = wo::word_at(wo::first_word_at(lane), piece, unit) / 4;
        words.insert(word);
        banks.insert(word % 32);
      }
      CHECK_EQUAL(words.size(), banks.size());
    }
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::set<int> banks;
      for (int row = 0; row < 8; ++row) banks.insert(wo::row_at(wo::first_row_at(matrix * 8 + row), piece) / 16 % 8);
      CHECK_EQUAL(banks.size(), std::size_t{8});
    }
  }
}

// The instruction goes from its first byte by lines of 128 for tokens, and swizzles the sum; TMA swizzles each box.
void tokens_are_read_where_they_are_written() {
  for (int tokens : {16, 32, 64, 128, 256}) {
    std::set<int> places;
    for (int column = 0; column < wo::kPadding; ++column) {
      for (int token = 0; token < tokens; ++token) {
        int const box = column / wo::kColumns * tokens * wo::kLine;
        int const written = box + wo::swizzled(token * wo::kLine + column % wo::kColumns * 2);
        int const first = wo::tokens_at(tokens, column / wo::kInstruction * wo::kInstruction);
        CHECK_EQUAL(first % 16, 0);
        CHECK_EQUAL(written, wo::swizzled(first + token * wo::kLine + column % wo::kInstruction * 2));
        places.insert(written);
      }
    }
    CHECK_EQUAL(static_cast<int>(places.size()), tokens * wo::kPadding);
    CHECK(*places.rbegin() < tokens * wo::kPadding * 2);
  }
}

void stages_are_aligned_and_fit() {
  constexpr int kSharedOfSm90 = 232448;
  for (wo::WgmmaConfig const& config : wo::kWgmmaRows) {
    for (int bits : {4, 8}) {
      for (int groups : {1, 2, 4}) {
        for (int scale_bytes : {2, 4}) {
          if (config.rounds && scale_bytes != 2) continue;  // of the tokens' type
          for (int zero_bytes : {0, 1}) {
            wo::WgmmaStage const stage(config, bits, groups, scale_bytes, zero_bytes);
            CHECK_EQUAL(wo::slab_bytes(bits) % wo::kAtom, 0);
            CHECK_EQUAL(stage.tokens_at % wo::kAtom, 0);
            CHECK_EQUAL(wo::tokens_at(config.tokens, wo::kColumns) % wo::kAtom, 0);
            CHECK_EQUAL(stage.bytes % wo::kAtom, 0);
            CHECK_EQUAL(stage.scales_at % 128, 0);
            CHECK_EQUAL(stage.zeros_at % 128, 0);
            CHECK(stage.end <= stage.bytes && wo::wgmma_stages(stage, kSharedOfSm90) >= 2);
            CHECK(wo::wgmma_shared_bytes(config, stage, kSharedOfSm90) + wo::kBarrierBytes <= kSharedOfSm90);
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  nibbles_reach_their_slots();
  bytes_reach_their_slots();
  banks_do_not_conflict();
  tokens_are_read_where_they_are_written();
  stages_are_aligned_and_fit();
  return test::failures != 0;
}
