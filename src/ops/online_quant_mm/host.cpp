// online_quant_mm on the CPU: tokens are quantised and brought into the order of host_slab.h, then slabs of the weight
// shared among threads.

#include <algorithm>
#include <string>
#include <vector>

#include "core/host_columns.h"
#include "core/threads.h"
#include "ops/online_quant_mm/host_slab.h"
#include "ops/online_quant_mm/launch.h"

namespace epiloq::ops::online_quant_mm {
namespace {

// Tokens that go through a slab together: their sums and a piece of their values stay in the second cache.
constexpr int kTokensAtOnce = 512;

template <int kWords>
void in_order(std::int8_t const* q, int k, int group, std::int32_t* out) {
  for (int begin = 0; begin < k; begin += group) {
    int const end = std::min(begin + group, k);
    int i = begin;
    for (; i + 4 <= end; i += 4, out += kWords) bytes_in_order<kWords>(q + i, out);
    if (i == end) continue;
    std::int8_t last[4] = {};
    std::copy_n(q + i, end - i, last);
    bytes_in_order<kWords>(last, out);
    out += kWords;
  }
}

int words_of_four() {
  return with_bytes([](auto bytes) { return bytes.kWords; });
}

struct Tokens {
  std::vector<TokenBlock> blocks;  // [m, blocks]
  std::vector<std::int32_t> x;     // [m, words]

  Tokens(quantize_blockwise_int8::Problem const& p, DType dtype, int bits, int threads) {
    auto* const to_words = with_bytes([](auto bytes) { return &in_order<decltype(bytes)::kWords>; });
    std::int64_t const count = (p.cols + p.group - 1) / p.group, words = count * ((p.group + 3) / 4) * words_of_four();
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
        to_words(q.data(), p.cols, p.group, x.data() + row * words);
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

// [blocks, 3, 16] of a slab, zeros where the weight has no offsets.
void read_parameters(gemm::BlockwiseProblem const& p, int slab, int rows, int blocks, float* to) {
  for (int block = 0; block < blocks; ++block) {
    for (int kind = 0; kind < p.kinds; ++kind) {
      std::copy_n(p.b_parameters + (static_cast<std::int64_t>(block) * p.kinds + kind) * p.padded_n + slab * kSlab,
                  rows, to + (block * 3 + kind) * kSlab);
    }
  }
}

int threads_for(gemm::BlockwiseProblem const& p, int threads) {
  constexpr std::int64_t kWorth = 1 << 17;  // products: a few microseconds, which it takes to wake a thread
  return static_cast<int>(std::clamp<std::int64_t>(std::int64_t{p.m} * p.n * p.k / kWorth, 1, std::max(threads, 1)));
}

}  // namespace

std::string describe_on_host() {
  return std::string("cpu, int8 products of 16 rows at a time, ") + with_bytes([](auto bytes) { return bytes.kName; });
}

void run_on_host(OnlineQuantProblem const& problem, Work const& work, int threads) {
  static auto const multiply = ByteVersions<MultiplySlab, SlabByTokens const&, Line*>::here();
  gemm::BlockwiseProblem const& p = work.gemm;
  threads = threads_for(p, threads);
  Tokens const tokens(work.quantise, p.dtype, problem.bits, threads);
  SlabByTokens all{};
  all.stride = std::int64_t{p.k} * problem.bits / 8, all.bits = problem.bits;
  all.k = work.quantise.cols, all.group = work.quantise.group, all.blocks = (all.k + all.group - 1) / all.group;
  std::int64_t const slabs = (p.n + kSlab - 1) / kSlab, chunks = (p.m + kTokensAtOnce - 1) / kTokensAtOnce;
  std::int64_t const words = all.blocks * all.group_words() * words_of_four();
  Columns const out{p.bias, p.out, p.dtype, p.stride_out, p.lo, p.hi};
  share(slabs * chunks, threads, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> parameters(static_cast<std::size_t>(all.blocks) * 3 * kSlab);
    std::vector<Line> buffer(workspace_lines(all)), sums(std::min(p.m, kTokensAtOnce));
    for (std::int64_t i = first; i < last; ++i) {
      int const slab = static_cast<int>(i % slabs), row = static_cast<int>(i / slabs) * kTokensAtOnce;
      SlabByTokens s = all;
      s.rows = std::min(kSlab, p.n - slab * kSlab), s.m = std::min(kTokensAtOnce, p.m - row);
      s.values = p.b + slab * kSlab * s.stride;
      s.parameters = parameters.data(), s.words = buffer.data();
      s.x = tokens.x.data() + row * words, s.tokens = tokens.blocks.data() + std::int64_t{row} * s.blocks;
      read_parameters(p, slab, s.rows, s.blocks, parameters.data());
      std::fill_n(sums.begin(), s.m, Line{});
      multiply(s, sums.data());
      write(out, row, s.m, slab * kSlab, s.rows, sums.data());
    }
  });
}

}  // namespace epiloq::ops::online_quant_mm
