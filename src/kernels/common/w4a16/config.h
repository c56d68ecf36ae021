#pragma once

// What kernels of 16-bit tokens by packed weights are made from.

namespace epiloq::ops::weight_only_mm {

// cp.async writes eight lanes' 16 bytes each into shared memory at once if they are one line. With rings that began 16
// bytes beside one, 2112 x 7168 of 4 bits by 8 tokens took 6.8 us for 5.1, with stages 64 beside, 4096 x 4096 4.6
// for 4.2.
inline constexpr int kSharedLine = 128;
constexpr int whole_lines(int bytes) { return (bytes + kSharedLine - 1) / kSharedLine * kSharedLine; }

// At most kGemvTokens tokens: `warps` warps take turns at the steps of K, of `panels` panels of 16 rows of 4-bit
// weights, or the same bytes of 8-bit ones; each asks `stages` - 1 of its steps ahead. `blocks` have their registers in
// an SM, at least. With `digits` tokens are multiplied as integers, kDigitTokens at most.
inline constexpr int kGemvTokens = 8, kDigitTokens = 2;
inline constexpr int kDigitBytes = 512;  // of a token and 128 columns
struct GemvConfig {
  int panels, warps, stages, blocks;
  bool digits;

  constexpr int tokens() const { return digits ? kDigitTokens : kGemvTokens; }
  constexpr int panels_of(int bits) const { return panels * 4 > bits ? panels * 4 / bits : 1; }
};

// More tokens: a block of `warps` warps of 32 weight rows each, by tiles of `tokens`; steps in shared memory, of 4-bit
// and of 8-bit weights; blocks that an SM's registers hold.
struct TiledConfig {
  int warps, tokens, stages4, stages8, blocks;

  constexpr int rows() const { return 32 * warps; }
  constexpr int stages(int bits) const { return bits == 4 ? stages4 : stages8; }
};

// SM90, few tokens, but more than digits: TMA fills a ring of steps that all warps of a block share, tokens among them,
// which streams read again for every warp. `teams` warps multiply `panels` panels of 16 weight rows each, by all
// tokens, and that `ways` times, each way taking every `ways`-th step of K: a warp needs no other one, and its tokens
// are fragments for all its panels, where wgmma's warps wait for their group. `blocks` have their registers and shared
// memory in an SM.
struct DecodeConfig {
  int m_groups, k_groups, panels, tokens, blocks;

  constexpr int warps() const { return m_groups * k_groups; }
  constexpr int rows() const { return 16 * panels * m_groups; }
};

// SM90, more tokens: `teams` warpgroups of `blocks` times 64 weight rows each, by tiles of `tokens`; and that `ways`
// times, each way taking every `ways`-th step of K. Tiles are high because each reads all tokens from L2, whose
// bandwidth otherwise ends before memory's; so there are few, and K is shared. With many tokens the tensor cores are
// all that counts, and `rounds` lets them add up everything: a weight is rounded to the tokens' type with its scale, as
// for a dense product, and not its group's sum multiplied.
struct WgmmaConfig {
  int m_groups, k_groups, blocks, tokens;
  bool rounds;

  constexpr int warpgroups() const { return m_groups * k_groups; }
  constexpr int rows() const { return 64 * m_groups * blocks; }
};

// Blocks that an SM's registers and shared memory hold.
constexpr int resident_blocks(DecodeConfig const& c) { return c.blocks; }
constexpr int resident_blocks(WgmmaConfig const&) { return 1; }

}  // namespace epiloq::ops::weight_only_mm
