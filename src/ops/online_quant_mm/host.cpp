// online_quant_mm on the CPU: tokens are quantised and brought into the order of host_slab.h, then slabs of the weight
// shared among threads.

#include <algorithm>
#include <vector>

#include "core/host_columns.h"
#include "core/on_lines.h"
#include "core/threads.h"
#include "ops/online_quant_mm/host_slab_tiles.h"
#include "ops/online_quant_mm/launch.h"

namespace epiloq::ops::online_quant_mm {
namespace {

// Tokens that go through a slab together: their sums and a piece of their values stay in the second cache.
constexpr int kTokensAtOnce = 512;

struct Tokens {
  std::vector<TokenBlock> blocks;  // [m, blocks]
  OnLines<std::int32_t> x;         // [m, words]

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

 private:
  static void quantise(quantize_blockwise_int8::Problem p, DType dtype, int row, std::int8_t* q, TokenBlock* to,
                       std::vector<float>& scratch) {
    p.q = q, p.stride_q = 0;
    p.scale = &to->scale, p.offset = &to->offset, p.sum = &to->correction;
    p.row_stride = 0, p.block_stride = sizeof(TokenBlock) / sizeof(float);
    quantize_blockwise_int8::quantize_row_on_host(p, dtype, row, scratch);
  }
};

// [blocks, 3, kRows] of rows from `first` on, zeros where the weight has no offsets.
void read_parameters(gemm::BlockwiseProblem const& p, int first, int rows, int blocks, float* to) {
  for (int block = 0; block < blocks; ++block) {
    for (int kind = 0; kind < p.kinds; ++kind) {
      std::copy_n(p.b_parameters + (static_cast<std::int64_t>(block) * p.kinds + kind) * p.padded_n + first, rows,
                  to + (block * 3 + kind) * bytes_here().rows);
    }
  }
}

int threads_for(gemm::BlockwiseProblem const& p, int threads) {
  constexpr std::int64_t kWorth = 1 << 17;  // products: a few microseconds, which it takes to wake a thread
  return static_cast<int>(std::clamp<std::int64_t>(std::int64_t{p.m} * p.n * p.k / kWorth, 1, std::max(threads, 1)));
}

struct Multiplier {
  void (*run)(SlabByTokens const& slab, float* sums);
  char const* name;
};

Multiplier multiplier_for([[maybe_unused]] std::int64_t tokens, [[maybe_unused]] SlabByTokens const& slab) {
#ifdef EPILOQ_HAS_CLONES
  if (MultiplySlabInTiles::serves(tokens, slab.group, slab.is_whole())) return {&MultiplySlabInTiles::run, "AMX"};
#endif
  static auto const run = ByteVersions<MultiplySlab, SlabByTokens const&, float*>::here();
  return {run, bytes_here().name};
}

}  // namespace

std::string describe_on_host(OnlineQuantProblem const& problem) {
  SlabByTokens slab{};
  slab.k = static_cast<int>(problem.k), slab.group = static_cast<int>(std::min(problem.group_size, problem.k));
  return std::string("cpu, int8 products with ") + multiplier_for(problem.m, slab).name;
}

void run_on_host(OnlineQuantProblem const& problem, Work const& work, int threads) {
  gemm::BlockwiseProblem const& p = work.gemm;
  int const rows = bytes_here().rows;
  threads = threads_for(p, threads);
  Tokens const tokens(work.quantise, p.dtype, problem.bits, threads);
  SlabByTokens all{};
  all.stride = std::int64_t{p.k} * problem.bits / 8, all.bits = problem.bits;
  all.k = work.quantise.cols, all.group = work.quantise.group, all.blocks = (all.k + all.group - 1) / all.group;
  Multiplier const multiplier = multiplier_for(p.m, all);
  std::int64_t const slabs = (p.n + rows - 1) / rows, chunks = (p.m + kTokensAtOnce - 1) / kTokensAtOnce;
  std::int64_t const words = std::int64_t{all.blocks} * all.group_words() * bytes_here().words;
  Columns const out{p.bias, p.out, p.dtype, p.stride_out, p.lo, p.hi};
  share(slabs * chunks, threads, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> parameters(std::size_t(all.blocks) * 3 * rows), sums(std::min(p.m, kTokensAtOnce) * rows);
    std::vector<Line> columns(all.columns() * rows * sizeof(float) / sizeof(Line));
    for (std::int64_t i = first; i < last; ++i) {
      int const column = static_cast<int>(i % slabs) * rows, row = static_cast<int>(i / slabs) * kTokensAtOnce;
      SlabByTokens s = all;
      s.rows = std::min(rows, p.n - column), s.m = std::min(kTokensAtOnce, p.m - row);
      s.values = p.b + column * s.stride;
      s.parameters = parameters.data(), s.words = columns.data();
      s.x = tokens.x.data() + row * words, s.tokens = tokens.blocks.data() + std::int64_t{row} * s.blocks;
      read_parameters(p, column, s.rows, s.blocks, parameters.data());
      std::fill_n(sums.begin(), s.m * rows, 0.F);
      multiplier.run(s, sums.data());
      write(out, row, s.m, column, s.rows, sums.data(), rows);
    }
  });
}

}  // namespace epiloq::ops::online_quant_mm
