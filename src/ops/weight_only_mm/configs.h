#pragma once

// Every kernel that weight_only_mm is compiled for, as sweeps of more left them; times.h has what they take. Data: a
// new one is a row.

#include <array>

namespace epiloq::ops::weight_only_mm {

// cp.async writes eight lanes' 16 bytes each into shared memory at once if they are one line. With rings that began 16
// bytes beside one, 2112 x 7168 of 4 bits by 8 tokens took 6.8 us for 5.1, with stages 64 beside, 4096 x 4096 4.6
// for 4.2.
inline constexpr int kSharedLine = 128;
constexpr int whole_lines(int bytes) { return (bytes + kSharedLine - 1) / kSharedLine * kSharedLine; }

// At most kStreamTokens tokens: `warps` warps take turns at the steps of K, of `slabs` slabs of 16 rows of 4-bit
// weights, or the same bytes of 8-bit ones; each asks `stages` - 1 of its steps ahead. `blocks` have their registers in
// an SM, at least. With `digits` tokens are multiplied as integers, kDigitTokens at most.
inline constexpr int kStreamTokens = 8, kDigitTokens = 2;
inline constexpr int kDigitBytes = 512;  // of a token and 128 columns
struct StreamConfig {
  int slabs, warps, stages, blocks;
  bool digits;

  constexpr int tokens() const { return digits ? kDigitTokens : kStreamTokens; }
  constexpr int slabs_of(int bits) const { return slabs * 4 > bits ? slabs * 4 / bits : 1; }
};

// More tokens: a block of `warps` warps of 32 weight rows each, by tiles of `tokens`; steps in shared memory, of 4-bit
// and of 8-bit weights; blocks that an SM's registers hold.
struct TiledConfig {
  int warps, tokens, stages4, stages8, blocks;

  constexpr int rows() const { return 32 * warps; }
  constexpr int stages(int bits) const { return bits == 4 ? stages4 : stages8; }
};

// Some fill an SM with one block and all of a layer with one wave, others by small blocks that K may share; with 7
// slabs 28672 rows are two blocks for each SM. The last row fits the shared memory of every device, and is all that
// SM75 has.
inline constexpr std::array kStreamRows{
    StreamConfig{4, 16, 2, 1, true},  StreamConfig{4, 8, 3, 2, true},  StreamConfig{4, 4, 3, 3, true},
    StreamConfig{4, 4, 2, 4, true},   StreamConfig{7, 4, 3, 1, true},  StreamConfig{7, 4, 2, 2, false},
    StreamConfig{8, 4, 2, 2, false},  StreamConfig{4, 4, 3, 3, false}, StreamConfig{2, 16, 2, 1, false},
    StreamConfig{2, 8, 3, 2, false},  StreamConfig{2, 4, 3, 4, false}, StreamConfig{1, 16, 3, 2, false},
    StreamConfig{1, 16, 2, 2, false}, StreamConfig{1, 4, 2, 2, false},
};

// By tokens, fewest first, and again one that fits everywhere.
inline constexpr std::array kTiledRows{
    TiledConfig{8, 16, 4, 3, 2},  TiledConfig{8, 32, 4, 3, 2}, TiledConfig{8, 64, 4, 3, 1},
    TiledConfig{8, 128, 3, 2, 1}, TiledConfig{4, 32, 2, 2, 2},
};

// SM90, few tokens, but more than digits: TMA fills a ring of steps that all warps of a block share, tokens among them,
// which streams read again for every warp. `teams` warps multiply `slabs` slabs of 16 weight rows each, by all tokens,
// and that `ways` times, each way taking every `ways`-th step of K: a warp needs no other one, and its tokens are
// fragments for all its slabs, where wgmma's warps wait for their group. `blocks` have their registers and shared
// memory in an SM.
struct RingConfig {
  int teams, ways, slabs, tokens, blocks;

  constexpr int warps() const { return teams * ways; }
  constexpr int rows() const { return 16 * slabs * teams; }
};

// SM90, more tokens: `teams` warpgroups of `blocks` times 64 weight rows each, by tiles of `tokens`; and that `ways`
// times, each way taking every `ways`-th step of K. Tiles are high because each reads all tokens from L2, whose
// bandwidth otherwise ends before memory's; so there are few, and K is shared. With many tokens the tensor cores are
// all that counts, and `rounds` lets them add up everything: a weight is rounded to the tokens' type with its scale, as
// for a dense product, and not its group's sum multiplied.
struct WgmmaConfig {
  int teams, ways, blocks, tokens;
  bool rounds;

  constexpr int warpgroups() const { return teams * ways; }
  constexpr int rows() const { return 64 * teams * blocks; }
};

// Blocks that an SM's registers and shared memory hold.
constexpr int resident_blocks(RingConfig const& c) { return c.blocks; }
constexpr int resident_blocks(WgmmaConfig const&) { return 1; }

// By tokens, fewest first. Of 19 shapes of blocks the fastest was 0.3 % ahead of these in the mean of ten layers by 8
// tokens, 0.7 by 16 (H200).
inline constexpr std::array kRingRows{
    RingConfig{2, 4, 2, 8, 2},  RingConfig{4, 2, 2, 8, 2},  RingConfig{6, 2, 2, 8, 1},  RingConfig{1, 8, 4, 16, 1},
    RingConfig{2, 4, 2, 16, 2}, RingConfig{2, 2, 4, 16, 2}, RingConfig{6, 2, 2, 16, 1},
};

// Those that multiply exact integers by tokens, fewest first, and by rows; then those that round.
inline constexpr std::array kWgmmaRows{
    WgmmaConfig{4, 1, 1, 32, false},  WgmmaConfig{3, 2, 1, 32, false}, WgmmaConfig{2, 2, 1, 32, false},
    WgmmaConfig{1, 2, 1, 32, false},  WgmmaConfig{4, 1, 1, 64, false}, WgmmaConfig{3, 1, 1, 64, false},
    WgmmaConfig{2, 2, 1, 64, false},  WgmmaConfig{1, 2, 1, 64, false}, WgmmaConfig{2, 1, 2, 128, false},
    WgmmaConfig{1, 2, 1, 128, false}, WgmmaConfig{2, 1, 1, 128, true}, WgmmaConfig{2, 1, 1, 256, true},
};
// On SM90, up to so many tokens weights are not rounded.
inline constexpr int kExactTokens = 128;
// Two tiles at most take up to so many tokens; for more, none is narrower.
inline constexpr int kWideTokens = 64;

// Without wgmma, from here on a dense product, of the weight de-quantised into memory first, is faster. H200,
// 2026-11-20: at 256 tokens the tiled kernel takes 2.4 to 5 times a bf16 product, on seven layer shapes, where
// de-quantising costs as much as one or two; at 64 tokens 0.9 to 2.4 times. Between them this is interpolated.
inline constexpr int kDenseTokens = 192;

}  // namespace epiloq::ops::weight_only_mm
