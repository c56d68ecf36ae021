#pragma once

// Configurations of the weight-only kernels: 16-bit tokens by packed weights.

namespace epiloq::ops::weight_only_mm {

// Stages begin at multiples of 128 bytes: cp.async writes the 16 bytes of eight lanes at once only if they form one
// line.
inline constexpr int kSharedLine = 128;
constexpr int whole_lines(int bytes) { return (bytes + kSharedLine - 1) / kSharedLine * kSharedLine; }

// FP32 sums in shared memory, [token][row]; the padding puts a fragment's tokens in different banks.
constexpr int sum_stride(int rows) { return rows + 4; }
constexpr int sum_bytes(int rows, int tokens) { return tokens * sum_stride(rows) * 4; }

// GEMV, at most kGemvTokens tokens. `warps` warps alternate K steps, each for `panels` panels of 16 rows of 4-bit
// weights (others: as many as have no more bytes), with `stages` - 1 steps in flight. `blocks` is the least number of
// resident CTAs per SM. With `integer` tokens are multiplied as integers, at most kIntegerTokens of them.
inline constexpr int kGemvTokens = 8, kIntegerTokens = 2;
inline constexpr int kIntegerBytes = 512;  // per token and 128 columns
struct GemvConfig {
  int panels, warps, stages, blocks;
  bool integer;

  constexpr int tokens() const { return integer ? kIntegerTokens : kGemvTokens; }
  constexpr int panels_of(int bits) const { return panels * 4 > bits ? panels * 4 / bits : 1; }
};

// mma.sync GEMM: `warps` warps of 32 weight rows each and `tokens` tokens per CTA tile; stages for weights of up to 4
// bits and of 8 bits; resident CTAs per SM.
struct TiledConfig {
  int warps, tokens, stages4, stages8, blocks;

  constexpr int rows() const { return 32 * warps; }
  constexpr int stages(int bits) const { return bits <= 4 ? stages4 : stages8; }
};

// SM90 decode kernel with TMA, for small M: one pipeline of K steps, tokens included, shared by all warps of a CTA.
// `m_groups` warps multiply `panels` panels of 16 weight rows each by all tokens, and `k_groups` such sets alternate K
// steps. Warps do not wait for each other, unlike wgmma's. `blocks` is the number of resident CTAs per SM.
struct DecodeConfig {
  int m_groups, k_groups, panels, tokens, blocks;

  constexpr int warps() const { return m_groups * k_groups; }
  constexpr int rows() const { return 16 * panels * m_groups; }
};

// SM90 WGMMA GEMM: `m_groups` warpgroups of `blocks` x 64 weight rows each, by `tokens` tokens; `k_groups` such sets
// alternate K steps. Tiles are tall because each reads all tokens from L2, whose bandwidth is the limit; so there
// are few tiles, and K is split. With `rounds` a weight is rounded to the tokens' type together with its scale, as for
// a dense product, and the tensor cores accumulate over all of K.
struct WgmmaConfig {
  int m_groups, k_groups, blocks, tokens;
  bool rounds;

  constexpr int warpgroups() const { return m_groups * k_groups; }
  constexpr int rows() const { return 64 * m_groups * blocks; }
};

// Resident CTAs per SM.
constexpr int resident_blocks(DecodeConfig const& c) { return c.blocks; }
constexpr int resident_blocks(WgmmaConfig const&) { return 1; }

}  // namespace epiloq::ops::weight_only_mm
