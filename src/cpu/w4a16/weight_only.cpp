// Reads a packed weight on the CPU, by definition, a panel of rows at a time.

#include "cpu/w4a16/weight_only.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/float8.h"
#include "cpu/common/rows.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr int kRowBytes = 4 * 16;  // of rows g and g + 8 in a tile of 4 or 8 bits: four lanes

// The order of packed_layout.h by whole words, for the two widths that models use: two columns of a row are
// neighbours.
constexpr int kRowWords = kRowBytes / 4;

EPILOQ_CLONES void unpack_rows4(std::uint8_t const* tile, std::uint8_t* low, std::uint8_t* high) {
  std::uint32_t words[kRowWords];
  std::memcpy(words, tile, sizeof(words));
  std::uint16_t twos[2 * kRowWords];
  for (int t = 0; t < 4; ++t) {
    for (int i = 0; i < 4; ++i) {
      std::uint32_t const word = words[4 * t + i];
      twos[8 * i + t] = static_cast<std::uint16_t>((word & 0xff) | (word >> 8 & 0xff00));
      twos[8 * i + 4 + t] = static_cast<std::uint16_t>((word >> 8 & 0xff) | (word >> 16 & 0xff00));
    }
  }
  std::uint8_t pairs[kRowBytes];
  std::memcpy(pairs, twos, sizeof(pairs));
  for (int i = 0; i < kRowBytes; ++i) {
    low[i] = pairs[i] & 15;
    high[i] = pairs[i] >> 4;
  }
}

EPILOQ_CLONES void unpack_rows8(std::uint8_t const* tile, std::uint8_t* low, std::uint8_t* high) {
  std::uint16_t twos[2 * kRowWords], lows[kRowWords], highs[kRowWords];
  std::memcpy(twos, tile, sizeof(twos));
  for (int t = 0; t < 4; ++t) {
    for (int i = 0; i < 4; ++i) {
      lows[4 * i + t] = twos[8 * t + 2 * i];
      highs[4 * i + t] = twos[8 * t + 2 * i + 1];
    }
  }
  std::memcpy(low, lows, sizeof(lows));
  std::memcpy(high, highs, sizeof(highs));
}

// q - zero is exact; then a product and a sum, each rounded (-ffp-contract=off).
EPILOQ_CLONES void restore(std::uint8_t const* q, int count, float scale, float zero, float offset, float* out) {
  for (int i = 0; i < count; ++i) out[i] = scale * (static_cast<float>(q[i]) - zero) + offset;
}

// q - zero without a scale, in an 8-bit type.
void write_integers(std::uint8_t const* q, int count, float zero, DType dtype, std::uint8_t* out) {
  for (int i = 0; i < count; ++i) {
    float const difference = static_cast<float>(q[i]) - zero;
    out[i] = dtype == DType::kInt8 ? static_cast<std::uint8_t>(static_cast<std::int8_t>(difference))
                                   : encode<E4M3>(difference);
  }
}

// The integers of a panel as rows [16, padded_k], from 0.
void unpack_panel(Weight const& w, std::uint8_t const* q, std::uint8_t* values) {
  int const bits = read_bits(w.bits);
  auto* const unpack = bits == 4 ? unpack_rows4 : unpack_rows8;
  for (int first = 0; first < w.padded_k; first += depth(bits)) {
    for (int g = 0; g < kPanelRows / 2; ++g, q += kRowBytes) {
      std::uint8_t* const low = values + static_cast<std::int64_t>(g) * w.padded_k + first;
      unpack(q, low, low + static_cast<std::int64_t>(kPanelRows / 2) * w.padded_k);
    }
  }
}

}  // namespace

void dequantize_on_host(DequantizeProblem const& problem) {
  Weight const& w = problem.weight;
  PackedPanel panel(w);
  std::vector<std::uint8_t> values(static_cast<std::size_t>(kPanelRows) * w.padded_k);
  std::vector<float> row(w.k);
  bool const scaled = size_of(problem.out_dtype) > 1;
  for (int n = 0; n < w.n; ++n) {
    int const in_panel = n % kPanelRows;
    if (in_panel == 0) panel.read(w, n / kPanelRows), unpack_panel(w, panel.q, values.data());
    std::uint8_t const* const q = values.data() + static_cast<std::size_t>(in_panel) * w.padded_k;
    std::int64_t const first = static_cast<std::int64_t>(n) * w.k;
    for (int k = 0, at = parameter_of(in_panel); k < w.k; k += w.group, at += kPanelRows) {
      int const count = std::min(w.group, w.k - k);
      if (scaled) {
        restore(q + k, count, panel.scale[at], panel.zero[at], panel.offset[at], row.data() + k);
      } else {
        write_integers(q + k, count, panel.zero[at], problem.out_dtype,
                       static_cast<std::uint8_t*>(problem.out) + first + k);
      }
    }
    if (scaled) write_row(row.data(), w.k, problem.out_dtype, problem.out, first);
  }
}

}  // namespace epiloq::ops::weight_only_mm
