#pragma once

// Shared-memory layout of a stage of sm80/online_quant_gemm.cuh: which 16-byte chunks a thread copies and which a lane
// reads. Host code, so that tests can check every address.

#include <cstdint>

namespace epiloq::gemm {

constexpr int kOnlineQuantStep = 128;  // K values per stage
constexpr int kParameterKinds = 3;     // per quantisation block, at most

// 16 bytes to copy, or zeros if not `inside`; `to` is a shared-memory address.
struct OnlineQuantChunk {
  unsigned to;
  void const* source;
  bool inside;
};

// A stage's rows of A or B, and the parameters of its quantisation blocks, [block][kind][row]. The 16-byte chunks of a
// row are permuted so that the same chunk of eight neighbouring rows lies in different banks.
template <int kThreads_, int kTileRows, int kRowBytes, int kBlocks>
struct OnlineQuantOperand {
  static constexpr int kThreads = kThreads_;
  static constexpr int kChunks = kRowBytes / 16, kRowsAtOnce = kThreads / kChunks, kParameterChunks = kTileRows / 4;
  static constexpr int kValueBytes = kTileRows * kRowBytes;
  static constexpr int kParameterBytes = kBlocks * kParameterKinds * kTileRows * 4;
  // Chunks per thread; parameter chunks at most.
  static constexpr int kValues = kTileRows / kRowsAtOnce;
  static constexpr int kParameters = (kParameterBytes / 16 + kThreads - 1) / kThreads;
  static_assert(kTileRows % kRowsAtOnce == 0);

  std::int8_t const* values;
  std::int64_t stride;
  int first, rows;  // of the tile, of all
  float const* parameters;
  int source_kinds, kinds;  // present, copied
  int padded_rows;

  static constexpr int swizzled_offset(int row, int chunk) {
    int const key = kChunks == 8 ? row % 8 : row / 2 % 4;
    return row * kRowBytes + ((chunk ^ key) << 4);
  }
  static constexpr int parameters_of(int block, int kind) { return (block * kParameterKinds + kind) * kTileRows; }

  // A thread's i-th chunk; `to` is where the stage's values begin.
  constexpr OnlineQuantChunk value(unsigned to, int i, int thread, int step) const {
    int const chunk = thread % kChunks;
    std::int8_t const* const base = values + static_cast<std::int64_t>(step) * kRowBytes + chunk * 16;
    int const row = i * kRowsAtOnce + thread / kChunks;
    bool const inside = first + row < rows;
    return {to + swizzled_offset(row, chunk), base + (inside ? first + row : 0) * stride, inside};
  }

  // The i-th chunk of all, of which a thread copies every kThreads-th.
  constexpr int parameter_count() const { return kBlocks * kinds * kParameterChunks; }
  constexpr OnlineQuantChunk parameter(unsigned to, int i, int step) const {
    int const row = 4 * (i % kParameterChunks), line = i / kParameterChunks;
    int const kind = line / kBlocks, block = line % kBlocks;
    bool const inside = first + row < padded_rows;
    std::int64_t const from = static_cast<std::int64_t>(step * kBlocks + block) * source_kinds + kind;
    return {to + (parameters_of(block, kind) + row) * 4, parameters + from * padded_rows + (inside ? first + row : 0),
            inside};
  }
};

// The matrix row (a row and a 16-byte chunk) whose address a lane passes to ldmatrix, for the K values from 32 x
// `depth` on.
struct LdmatrixRow {
  int row, chunk;
};
// 16 rows of A: 16 values of the upper 8 rows and of the lower 8, then the next 16 of both.
constexpr LdmatrixRow ldmatrix_row_a(int lane, int depth) { return {lane % 16, 2 * depth + lane / 16}; }
// 16 columns of B: 16 values and the next 16 of the first 8 columns, then of the others.
constexpr LdmatrixRow ldmatrix_row_b(int lane, int depth) {
  return {lane / 16 * 8 + lane % 8, 2 * depth + lane / 8 % 2};
}
// 4 bits: 32 values are one chunk; those of this depth and the next, or those of this depth twice.
constexpr LdmatrixRow ldmatrix_row_b4(int lane, int depth, bool twice) {
  return {lane / 16 * 8 + lane % 8, depth + (twice ? 0 : lane / 8 % 2)};
}

}  // namespace epiloq::gemm
