#pragma once

// Every tile that online_quant_mm is compiled for, and which problem takes which. Data: a new tile is one row and one
// rule.

#include <array>
#include <climits>
#include <span>

#include "gemm/config.h"

namespace epiloq::ops::online_quant_mm {

using gemm::BlockwiseConfig;
using gemm::BlockwiseSm90Config;

inline constexpr std::array kGroups{32, 64, 128};

// The problems m <= m_max, n <= n_max take row `tile`; rules are tried in order, the first that fits wins. The last
// rule takes everything.
struct Rule {
  int m_max, n_max;
  int tile;
};
inline constexpr int kAny = INT_MAX;

// SM80: tokens and weight rows of a warp's tile, warps along each, teams that share K, stages. Reasoned from bytes in
// flight and registers, not yet swept on a GPU.
inline constexpr std::array kTiles{
    BlockwiseConfig{16, 16, 1, 1, 4, 4},  // 0: few tokens: warps stream weights on their own
    BlockwiseConfig{16, 32, 1, 1, 4, 4},  // 1
    BlockwiseConfig{32, 32, 1, 1, 4, 3},  // 2
    BlockwiseConfig{32, 32, 2, 1, 2, 4},  // 3
    BlockwiseConfig{32, 64, 2, 1, 2, 3},  // 4
    BlockwiseConfig{64, 32, 1, 4, 1, 4},  // 5
    BlockwiseConfig{64, 32, 2, 4, 1, 4},  // 6
    BlockwiseConfig{32, 32, 2, 2, 1, 4},  // 7: fits every card
};
inline constexpr std::array kRules{
    Rule{8, 8192, 0},   Rule{16, 2560, 0},  Rule{16, kAny, 1},   Rule{32, kAny, 2},
    Rule{64, 8192, 3},  Rule{64, kAny, 4},  Rule{128, 2560, 7},  Rule{128, 4096, 3},
    Rule{256, 8192, 5}, Rule{512, 2560, 5}, Rule{kAny, kAny, 6}, Rule{kAny, kAny, 7},
};
// What SM90 takes of these before that, by few tokens (online-quant-few-sweep.json: blocks of 128, of both cards).
inline constexpr std::array kSm90FewRules8{
    Rule{16, 1536, 0}, Rule{16, kAny, 1}, Rule{32, 1536, 1}, Rule{32, 2560, 2},
    Rule{32, 4096, 1}, Rule{32, kAny, 2}, Rule{48, 2560, 0}, Rule{64, 2560, 1},
};
inline constexpr std::array kSm90FewRules4{
    Rule{16, 1536, 0}, Rule{16, 6144, 1}, Rule{16, 8192, 0}, Rule{16, kAny, 1}, Rule{32, 1536, 1},
    Rule{32, 2560, 2}, Rule{32, 4096, 0}, Rule{32, kAny, 2}, Rule{64, 2560, 0},
};
constexpr std::span<Rule const> sm90_few_rules(int bits) {
  if (bits == 8) return kSm90FewRules8;
  return kSm90FewRules4;
}

// SM75: one stage in shared memory (blockwise_sm75.cuh). Reasoned from a T4's bytes in flight and the 64 bytes a clock
// of its shared memory, never timed on one.
inline constexpr std::array kSm75Tiles{
    BlockwiseConfig{16, 16, 1, 1, 4, 1},  // 0: few tokens: warps stream weights on their own
    BlockwiseConfig{16, 32, 1, 1, 4, 1},  // 1
    BlockwiseConfig{32, 32, 1, 1, 4, 1},  // 2
    BlockwiseConfig{32, 32, 2, 1, 2, 1},  // 3
    BlockwiseConfig{32, 32, 2, 2, 1, 1},  // 4: up to three blocks an SM
    BlockwiseConfig{32, 48, 2, 2, 1, 1},  // 5: two, which read fewer bytes a product
};
inline constexpr std::array kSm75Rules{
    Rule{16, 2560, 0}, Rule{16, kAny, 1}, Rule{32, kAny, 2}, Rule{64, kAny, 3}, Rule{256, 2560, 4}, Rule{kAny, kAny, 5},
};

// SM90, blocks of 128: tokens of a tile (of 128 weight rows), and the ns of a block of K. Fitted with the numbers below
// to sweeps of eleven layers by 33 to 1024 tokens (online-quant-few-sweep.json of an H200 and an H100, 2026-11-26): the
// tile that they name takes 0.2 and 0.4 % more than the fastest in the mean, 8 and 13 at most.
inline constexpr int kSm90Group = 128;
inline constexpr std::array kSm90Tiles8{
    BlockwiseSm90Config{64, 366},  BlockwiseSm90Config{80, 415},  BlockwiseSm90Config{96, 460},
    BlockwiseSm90Config{112, 512}, BlockwiseSm90Config{128, 552},
};
inline constexpr std::array kSm90Tiles4{
    BlockwiseSm90Config{64, 387},  BlockwiseSm90Config{80, 446},  BlockwiseSm90Config{96, 485},
    BlockwiseSm90Config{112, 541}, BlockwiseSm90Config{128, 598},
};
constexpr auto const& sm90_tiles(int bits) { return bits == 8 ? kSm90Tiles8 : kSm90Tiles4; }
// What a tile takes beside its blocks of K, a token; what sending its sums to the blocks of a cluster adds, a token and
// each of those blocks.
inline constexpr int kSm90TokenNs = 12, kSm90SentTokenNs = 20, kSm90SplitNs = 100;
// What sharing the last wave alone should save at least, and behind how many waves it is still one: of 270 tiles and
// problems it took as much off up to nine as these times say (101 % in sum), behind more less, or added.
inline constexpr int kSm90LastWaveNs = 1000, kSm90MostWaves = 9;
// From how many tokens on these serve weights of so many rows and columns, of 8 bits and of 4: with fewer, bytes are
// all the time there is. The first rule that takes the weight.
struct Sm90Rule {
  int n_max, k_max;
  int min_tokens8, min_tokens4;
};
inline constexpr std::array kSm90Rules{
    Sm90Rule{2560, 2560, 65, 65},  Sm90Rule{12288, 6143, 33, 33}, Sm90Rule{2560, 8192, 17, 17},
    Sm90Rule{12288, 8192, 33, 33}, Sm90Rule{kAny, 8192, 1, 17},   Sm90Rule{kAny, kAny, 1, 1},
};

}  // namespace epiloq::ops::online_quant_mm
