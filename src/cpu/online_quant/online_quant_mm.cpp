// online_quant_mm on the CPU: tokens are quantised and permuted to the order of online_quant_panel.h, then panels of
// the weight shared among threads.

#include "problems/online_quant_mm.h"

#include <algorithm>
#include <vector>

#include "core/threads.h"
#include "cpu/common/columns.h"
#include "cpu/common/panels.h"
#include "cpu/online_quant/online_quant_amx.h"
#include "epiloq/batch_invariant.h"

namespace epiloq::ops::online_quant_mm {
namespace {

// Tokens that go through a panel together: their sums and a K block of their values stay in L2.
constexpr int kTokensAtOnce = 512;

// A token's integers, and its blocks' scales, offsets and, for now, sums as corrections.
void quantise(quantize_blockwise_int8::Problem p, DType dtype, int row, std::int8_t* q, TokenBlock* to,
              std::vector<float>& scratch) {
  p.q = q, p.stride_q = 0;
  p.scale = &to->scale, p.offset = &to->offset, p.sum = &to->correction;
  p.row_stride = 0, p.block_stride = sizeof(TokenBlock) / sizeof(float);
  quantize_blockwise_int8::quantize_row_on_host(p, dtype, row, scratch);
}

struct Tokens {
  std::vector<TokenBlock> blocks;  // [m, blocks]
  std::vector<std::int32_t> x;     // [m, words]

  Tokens(quantize_blockwise_int8::Problem const& p, DType dtype, int bits, int threads) {
    std::int64_t const count = (p.cols + p.group - 1) / p.group;
    std::int64_t const words_of_block = std::int64_t{p.group + 3} / 4 * bytes_here().words,
                       words = count * words_of_block;
    blocks.resize(p.rows * count), x.resize(p.rows * words);
    share(p.rows, threads, [&](std::int64_t first, std::int64_t last) {
      std::vector<std::int8_t> q(p.cols);
      std::vector<float> scratch;
      for (std::int64_t row = first; row < last; ++row) {
        TokenBlock* const to = blocks.data() + row * count;
        quantise(p, dtype, static_cast<int>(row), q.data(), to, scratch);
        for (int i = 0; i < count; ++i) {
          to[i].scaled_sum = to[i].scale * static_cast<float>(to[i].correction);
          to[i].correction *= -zero_of(bits);
        }
        for (int i = 0; i < count; ++i) {
          int const first = i * p.group;
          bytes_here().in_words(q.data() + first, std::min(p.group, p.cols - first),
                                x.data() + row * words + i * words_of_block);
        }
      }
    });
  }
};

// [blocks, 3, stride] of rows from `first` on, zeros where the weight has no offsets.
void read_parameters(gemm::OnlineQuantGemmProblem const& p, int first, int rows, int blocks, int stride, float* to) {
  for (int block = 0; block < blocks; ++block) {
    for (int kind = 0; kind < p.kinds; ++kind) {
      std::copy_n(p.b_parameters + (static_cast<std::int64_t>(block) * p.kinds + kind) * p.padded_n + first, rows,
                  to + (block * 3 + kind) * stride);
    }
  }
}

#ifdef EPILOQ_HAS_CLONES
bool uses_tiles(std::int64_t rows, int group) {
  std::int64_t const tokens = batch_invariant() ? MultiplyBlocksInTiles::kFewest : rows;
  return MultiplyBlocksInTiles::supports(tokens, group);
}

struct TiledTokens {
  TokenTiles tiles;
  std::vector<Line> x;
  std::vector<float> parameters;

  TiledTokens(quantize_blockwise_int8::Problem const& p, DType dtype, int threads) {
    constexpr int kTokens = TokenTiles::kTokens;
    int const blocks = (p.cols + p.group - 1) / p.group;
    std::int64_t const stride = std::int64_t{blocks} * p.group;
    tiles = {stride / columns_of_line(p.group), p.rows};
    x.resize(tiles.size());
    std::int64_t const up_to = std::int64_t{tiles.count()} * kTokens;
    parameters.resize(blocks * 3 * up_to);
    share(tiles.count(), threads, [&](std::int64_t first, std::int64_t last) {
      std::vector<std::int8_t> q(kTokens * stride);
      std::vector<TokenBlock> of_blocks(blocks);
      std::vector<float> scratch;
      for (auto tile = static_cast<int>(first); tile < last; ++tile) {
        int const count = std::min(kTokens, p.rows - tile * kTokens);
        for (int i = 0; i < count; ++i) {
          std::int64_t const token = std::int64_t{tile} * kTokens + i;
          quantise(p, dtype, static_cast<int>(token), q.data() + i * stride, of_blocks.data(), scratch);
          for (int block = 0; block < blocks; ++block) {
            TokenBlock const& of_block = of_blocks[block];
            float* const to = parameters.data() + block * 3 * up_to + token;
            to[0] = of_block.scale, to[up_to] = of_block.offset;
            to[2 * up_to] = of_block.scale * static_cast<float>(of_block.correction);
          }
        }
        MultiplyBlocksInTiles::arrange(q.data(), stride, p.group, tiles, tile, x.data());
      }
    });
  }
};

void multiply_tiles(OnlineQuantProblem const& problem, Work const& work, int threads) {
  gemm::OnlineQuantGemmProblem const& p = work.gemm;
  TiledTokens const tiled(work.quantise, p.dtype, threads);
  TokenBlocks const tokens{tiled.x.data(), tiled.tiles, tiled.parameters.data()};
  BlocksInTiles const all{.values = p.b,
                          .stride = std::int64_t{p.k} * problem.bits / 8,
                          .rows = 0,
                          .bits = problem.bits,
                          .k = work.quantise.cols,
                          .group = work.quantise.group,
                          .parameters = nullptr};
  constexpr int kRows = MultiplyBlocksInTiles::kRows;
  Columns const out{p.bias, p.out, p.dtype, p.stride_out, p.lo, p.hi};
  auto const finish = [&](PanelSums<float> const& sums) {
    write(out, sums.row, sums.count, sums.column, sums.columns, sums.values, sums.stride);
  };
  by_panels<float>(p.m, p.n, kRows, kTokensAtOnce, threads, finish, [&](int row, int first, int count, float* sums) {
    BlocksInTiles s = all;
    s.values += row * s.stride, s.rows = std::min(kRows, p.n - row);
    std::vector<float> parameters(std::size_t(s.blocks()) * 3 * kRows);
    read_parameters(p, row, s.rows, s.blocks(), kRows, parameters.data());
    s.parameters = parameters.data();
    MultiplyBlocksInTiles::run(s, tokens, first / TokenTiles::kTokens, count, reinterpret_cast<Line*>(sums));
  });
}
#else
bool uses_tiles(std::int64_t, int) { return false; }
void multiply_tiles(OnlineQuantProblem const&, Work const&, int) {}
#endif

}  // namespace

std::string describe_on_host(OnlineQuantProblem const& problem) {
  auto const group = static_cast<int>(std::min(problem.group_size, problem.k));
  return std::string("cpu, int8 products with ") + (uses_tiles(problem.m, group) ? "AMX" : bytes_here().name);
}

void run_on_host(OnlineQuantProblem const& problem, Work const& work, int threads) {
  gemm::OnlineQuantGemmProblem const& p = work.gemm;
  int const rows = bytes_here().rows;
  threads = threads_for_products(std::int64_t{p.m} * p.n * p.k, threads);
  if (uses_tiles(p.m, work.quantise.group)) return multiply_tiles(problem, work, threads);
  static auto const multiply = ByteVersions<MultiplyPanel, PanelByTokens const&, float*>::here();
  Tokens const tokens(work.quantise, p.dtype, problem.bits, threads);
  PanelByTokens all{};
  all.stride = std::int64_t{p.k} * problem.bits / 8, all.bits = problem.bits;
  all.k = work.quantise.cols, all.group = work.quantise.group, all.blocks = (all.k + all.group - 1) / all.group;
  std::int64_t const panels = (p.n + rows - 1) / rows, chunks = (p.m + kTokensAtOnce - 1) / kTokensAtOnce;
  std::int64_t const words = std::int64_t{all.blocks} * all.group_words() * bytes_here().words;
  Columns const out{p.bias, p.out, p.dtype, p.stride_out, p.lo, p.hi};
  share(panels * chunks, threads, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> parameters(std::size_t(all.blocks) * 3 * rows), sums(std::min(p.m, kTokensAtOnce) * rows);
    std::vector<Line> columns(all.columns() * rows * sizeof(float) / sizeof(Line));
    for (std::int64_t i = first; i < last; ++i) {
      int const column = static_cast<int>(i % panels) * rows, row = static_cast<int>(i / panels) * kTokensAtOnce;
      PanelByTokens s = all;
      s.rows = std::min(rows, p.n - column), s.m = std::min(kTokensAtOnce, p.m - row);
      s.values = p.b + column * s.stride;
      s.parameters = parameters.data(), s.words = columns.data();
      s.x = tokens.x.data() + row * words, s.tokens = tokens.blocks.data() + std::int64_t{row} * s.blocks;
      read_parameters(p, column, s.rows, s.blocks, rows, parameters.data());
      std::fill_n(sums.begin(), s.m * rows, 0.F);
      multiply(s, sums.data());
      write(out, row, s.m, column, s.rows, sums.data(), rows);
    }
  });
}

}  // namespace epiloq::ops::online_quant_mm
