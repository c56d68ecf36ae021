// The wgmma kernel without a GPU: every weight reaches the place of the fragments that the instruction reads; shared
// memory is read without bank conflicts; tokens are where TMA's swizzle puts them; stages are aligned and fit.

#include <algorithm>
#include <array>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "dispatch/weight_only_mm/tables.h"
#include "kernels/common/w4a16/sizes.h"
#include "kernels/sm90/w4a16/w4a16_stage_layout.h"
#include "packed_values.h"

namespace wo = epiloq::ops::weight_only_mm;

namespace {

struct Value {
  int row = -1, column = -1;
  bool operator==(Value const&) const = default;
};
using Byte = std::array<Value, 2>;  // of 8 bits, the first
using Word = std::array<Byte, 4>;

// A panel's step of 128 columns in shared memory.
std::vector<Byte> panel_of(int bits) {
  std::vector<Byte> memory(wo::panel_bytes(bits));
  std::vector<int> written(memory.size());
  for (int tile = 0; tile < wo::kPadding / wo::depth(bits); ++tile) {
    for (int lane = 0; lane < wo::kLanes; ++lane) {
      for (int i = 0; i < wo::lane_values(bits); ++i) {
        wo::TileCoord const coord = wo::tile_coord_of(bits, lane, i);
        int const byte = tile * wo::tile_bytes(bits) + lane * wo::lane_bytes(bits) + i * bits / 8;
        memory[byte][bits == 4 ? i % 2 : 0] = {coord.row, tile * wo::depth(bits) + coord.column};
        ++written[byte];
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
Value expected(int lane, int column, int reg, int half) {
  return {lane / 4 + 8 * (reg % 2), column + 8 * (reg / 2) + 2 * (lane % 4) + half};
}

void integers_reach_their_slots(int bits) {
  auto const memory = panel_of(bits);
  for (int lane = 0; lane < wo::kLanes; ++lane) {
    for (int column = 0; column < wo::kPadding; column += wo::kInstruction) {
      int const at = wo::lane_at(bits, 0, column) + wo::lane_at(bits, lane, 0), first = wo::word_of(bits, column);
      CHECK_EQUAL(at % 16, 0);
      CHECK(first + bits / 4 <= 4);
      for (int reg = 0; reg < 4; ++reg) {
        for (int half = 0; half < 2; ++half) {
          Value value;
          if (bits == 4) {  // (word >> 4 reg) & 0x000f000f
            int const nibble = reg + 4 * half;
            value = word_at(memory, at + first * 4)[nibble / 2][nibble % 2];
          } else {
            value = word_at(memory, at + (first + reg / 2) * 4)[reg % 2 * 2 + half][0];
          }
          CHECK(value == expected(lane, column, reg, half));
        }
      }
    }
  }
}

// Eight lanes at a time read 16 bytes each.
void banks_do_not_conflict() {
  for (int bits : {4, 8}) {
    for (int first = 0; first < wo::kLanes; first += 8) {
      std::set<int> banks;
      for (int lane = first; lane < first + 8; ++lane) banks.insert(wo::lane_at(bits, lane, 0) / 16 % 8);
      CHECK_EQUAL(banks.size(), std::size_t{8});
    }
  }
}

// Where TMA puts a byte of a box of tokens.
int swizzled(int at) { return at ^ at / wo::kLine % 8 * 16; }

// The instruction goes from its first byte by lines of 128 for tokens, and swizzles the sum; TMA swizzles each box.
void tokens_are_read_where_they_are_written() {
  for (int tokens : {16, 32, 64, 128, 256}) {
    std::set<int> places;
    for (int column = 0; column < wo::kPadding; ++column) {
      for (int token = 0; token < tokens; ++token) {
        int const box = column / wo::kColumns * tokens * wo::kLine;
        int const written = box + swizzled(token * wo::kLine + column % wo::kColumns * 2);
        int const first = wo::tokens_at(tokens, column / wo::kInstruction * wo::kInstruction, 2);
        CHECK_EQUAL(first % 16, 0);
        CHECK_EQUAL(written, swizzled(first + token * wo::kLine + column % wo::kInstruction * 2));
        places.insert(written);
      }
    }
    CHECK_EQUAL(static_cast<int>(places.size()), tokens * wo::kPadding);
    CHECK(*places.rbegin() < tokens * wo::kPadding * 2);
  }
}

template <class Config>
void stages_of_a_row(Config const& config, bool rounds) {
  constexpr int kSharedOfSm90 = 232448, kReserved = epiloq::kReservedPerCta;
  for (int bits : {4, 8}) {
    for (int groups : {1, 2, 4}) {
      for (int scale_bytes : {2, 4}) {
        if (rounds && scale_bytes != 2) continue;  // of the tokens' type
        for (int zero_bytes : {0, 1}) {
          wo::TileStage const stage(config, bits, groups, scale_bytes, zero_bytes);
          CHECK_EQUAL(wo::panel_bytes(bits) % 128, 0);
          CHECK(wo::panel_bytes(bits) / wo::kMapWord <= 256);
          CHECK_EQUAL(stage.tokens_at % wo::kAtom, 0);
          CHECK_EQUAL(wo::tokens_at(config.tokens, wo::kColumns, 2) % wo::kAtom, 0);
          CHECK_EQUAL(stage.bytes % wo::kAtom, 0);
          CHECK_EQUAL(stage.scales_at % 128, 0);
          CHECK_EQUAL(stage.zeros_at % 128, 0);
          int const stages = wo::stage_count(config, stage, kSharedOfSm90);
          CHECK(stage.end <= stage.bytes && stages >= 2);
          CHECK_EQUAL(stages % config.k_groups, 0);
          int const bytes =
              wo::pipeline_shared_bytes(config, stage, kSharedOfSm90) + wo::barrier_bytes(wo::most_stages(config));
          CHECK(bytes <= kSharedOfSm90);
          CHECK((bytes + kReserved) * wo::resident_blocks(config) <= kSharedOfSm90 + kReserved);
          CHECK(wo::early_steps(config.tokens) <= stages);
        }
      }
    }
  }
}

void stages_are_aligned_and_fit() {
  for (wo::WgmmaConfig const& config : wo::kWgmmaRows) stages_of_a_row(config, config.rounds);
  for (wo::DecodeConfig const& config : wo::kDecodeRows) stages_of_a_row(config, false);
}

// Blocks are apart as long as there are SMs for all of them; asked for so much memory, no more fit an SM.
template <class Config>
void blocks_of_a_row(Config const& config) {
  constexpr int kSms = 132, kSharedOfSm90 = 232448, kReserved = epiloq::kReservedPerCta;
  int const resident = wo::resident_blocks(config);
  for (int split = 1; split <= epiloq::kMaxCluster; ++split) {
    std::int64_t const apart = epiloq::clusters_at_once(split, 1, kSms);
    CHECK_EQUAL(wo::blocks_of_sm(config, 1, split, kSms), 1);
    CHECK_EQUAL(wo::blocks_of_sm(config, apart, split, kSms), 1);
    CHECK_EQUAL(wo::blocks_of_sm(config, apart + 1, split, kSms), resident);
  }
  for (int share = 1; share <= resident; ++share) {
    int const bytes = epiloq::smem_for_ctas_per_sm(share, kSharedOfSm90) + kReserved;
    CHECK(bytes * share <= kSharedOfSm90 + kReserved && bytes * (share + 1) > kSharedOfSm90 + kReserved);
  }
}

void blocks_of_an_sm() {
  for (wo::WgmmaConfig const& config : wo::kWgmmaRows) blocks_of_a_row(config);
  for (wo::DecodeConfig const& config : wo::kDecodeRows) blocks_of_a_row(config);
}

// CTAs that split K: each slice of D is reduced by one CTA, and the partial sums of each other CTA have a slot there.
void subtiles_have_one_owner_and_slots_apart() {
  for (int split = 1; split <= epiloq::kMaxCluster; ++split) {
    for (int subtiles = 1; subtiles <= 100; ++subtiles) {
      int owned = 0;
      for (int rank = 0; rank < split; ++rank) {
        wo::SubtileOwnership const owner{rank, split};
        std::set<int> slots;
        int own = 0;
        for (int i = 0; i < subtiles; ++i) {
          wo::Subtile const subtile = wo::Subtile::of(i, split);
          if (!owner.is_own(subtile)) continue;
          ++own;
          for (int other = 0; other < split; ++other) {
            if (other == rank) continue;
            wo::SubtileOwnership const sender{other, split};
            CHECK(!sender.is_own(subtile));
            CHECK(sender.distance_to(subtile) >= 1 && sender.distance_to(subtile) < split);
            slots.insert(wo::receive_slot(subtile, sender.distance_to(subtile), split));
          }
        }
        CHECK_EQUAL(owner.own_of(subtiles), own);
        CHECK_EQUAL(static_cast<int>(slots.size()), own * (split - 1));
        if (!slots.empty()) CHECK(*slots.begin() >= 0 && *slots.rbegin() < wo::receive_slots(subtiles, split));
        owned += own;
      }
      CHECK_EQUAL(owned, subtiles);
      wo::Subtile const next = wo::Subtile::of(subtiles, split).next(split),
                        following = wo::Subtile::of(subtiles + 1, split);
      CHECK(next.owner == following.owner && next.ordinal == following.ordinal);
    }
  }
}

// A wgmma tile's pieces are numbered once each, and a block finishes as many of each warp's, or one more.
void warps_finish_as_many_subtiles() {
  for (int k_groups = 1; k_groups <= 3; ++k_groups) {
    for (int token_groups : {1, 2, 3, 4, 5, 6, 7, 8, 16, 32}) {
      std::set<int> all;
      for (int panel = 0; panel < 16; ++panel) {
        for (int k_group = 0; k_group < k_groups; ++k_group) {
          int const first = wo::first_subtile(panel, k_group, token_groups, k_groups),
                    own = (token_groups - k_group + k_groups - 1) / k_groups;
          for (int i = 0; i < own; ++i) CHECK(all.insert(first + i).second);
          for (int split = 2; split <= epiloq::kMaxCluster; ++split) {
            std::array<int, epiloq::kMaxCluster> finished{};
            for (int i = 0; i < own; ++i) ++finished[wo::Subtile::of(first + i, split).owner];
            CHECK(*std::max_element(finished.begin(), finished.begin() + split) <= (own + split - 1) / split);
          }
        }
      }
      CHECK(static_cast<int>(all.size()) == 16 * token_groups && *all.rbegin() == 16 * token_groups - 1);
    }
  }
}

// What CTAs send one another fits behind or inside the pipeline's stages, as do a CTA's own partial sums.
void exchanges_fit() {
  constexpr int kSubtileBytes = wo::kPanelRows * 8 * 4;
  auto const subtiles_of = [](auto const& config) { return config.rows() / wo::kPanelRows * (config.tokens / 8); };
  auto const received_fit = [&](auto const& config) {
    for (int split = 2; split <= epiloq::kMaxCluster; ++split) {
      CHECK(wo::receive_slots(subtiles_of(config), split) * kSubtileBytes <= wo::exchange_bytes(config));
    }
  };
  // One way's slots are numbered by piece and sender, where the owner has as many for itself.
  auto const sums_fit = [&](auto const& config, int bytes) {
    for (int split = 2; split <= epiloq::kMaxCluster; ++split) {
      std::set<std::pair<int, int>> slots;
      for (int number = 0; number < subtiles_of(config); ++number) {
        int const owner = wo::Subtile::of(number, split).owner;
        for (int rank = 0; rank < split; ++rank) {
          int const slot = number - owner + rank;
          CHECK(slot >= 0 && (slot + 1) * kSubtileBytes <= bytes);
          CHECK(slots.insert({owner, slot}).second);
        }
      }
    }
  };
  for (wo::WgmmaConfig const& config : wo::kWgmmaRows) {
    for (int bits : {4, 8}) {
      wo::TileStage const stage(config, bits, 1, 2, 0);
      int const pipeline_bytes = wo::exchange_at(config, stage, 232448);
      if (config.k_groups > 1) {
        received_fit(config);
        CHECK((config.k_groups - 1) * subtiles_of(config) * kSubtileBytes <= pipeline_bytes);
      } else {
        sums_fit(config, wo::reduces_in_stages(config) ? pipeline_bytes : wo::exchange_bytes(config));
      }
    }
  }
  for (wo::DecodeConfig const& config : wo::kDecodeRows) {
    received_fit(config);
    CHECK_EQUAL(wo::gemv_subtiles(config.tokens, config.rows()), subtiles_of(config));
    wo::TileStage const stage(config, 4, 1, 2, 0);
    CHECK(config.k_groups * config.tokens * config.rows() * 4 <= wo::exchange_at(config, stage, 232448));
  }
}

}  // namespace

int main() {
  subtiles_have_one_owner_and_slots_apart();
  warps_finish_as_many_subtiles();
  exchanges_fit();
  for (int bits : {4, 8}) integers_reach_their_slots(bits);
  banks_do_not_conflict();
  tokens_are_read_where_they_are_written();
  stages_are_aligned_and_fit();
  blocks_of_an_sm();
  return test::failures != 0;
}
