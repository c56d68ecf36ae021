#include "cpu/w4a16/packed_panel.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/common/rows.h"
#include "cpu/isa/vectors.h"
#include "problems/narrow_codes.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr std::uint64_t kInEachByte = 0x0101010101010101u;

std::int64_t panel_bytes(Weight const& w) {
  return static_cast<std::int64_t>(w.padded_k) / depth(w.bits) * kLanes * lane_bytes(w.bits);
}

// 2^(byte - 127), and NaN for 255.
EPILOQ_CLONES void read_e8m0(std::uint8_t const* bytes, int count, float* out) {
  for (int i = 0; i < count; ++i) {
    std::uint32_t const byte = bytes[i];
    out[i] = std::bit_cast<float>(byte == 0 ? 1u << 22 : byte == 255 ? 0x7fc00000u : byte << 23);
  }
}

// A scale of NVFP4: the upper eight bits after the sign of 128 times it as float16.
EPILOQ_CLONES void read_packed_e4m3(std::uint8_t const* bytes, int count, float* out) {
  constexpr std::uint32_t kNotFinite = 0xf8;
  for (int i = 0; i < count; ++i) {
    std::uint32_t const byte = bytes[i];
    float const scale = std::bit_cast<float>(byte << 20) * 0x1p105f;  // float16's exponents become float32's
    out[i] = byte >= kNotFinite ? __builtin_nanf("") : scale;
  }
}

// [groups, 16] to [groups / 4, 16, 4].
void put_in_fours(std::uint8_t const* bytes, int count, std::uint8_t* out) {
  using Bytes = Vectors<kPanelRows>::Bytes;
  constexpr int kBytes = 4 * kPanelRows;
  for (int at = 0; at < count; at += kBytes) {
    Bytes groups[4], low[2], high[2], fours[4];
    std::memcpy(groups, bytes + at, kBytes);
    for (int i = 0; i < 2; ++i) zip_low(low[i], groups[i], groups[i + 2]), zip_high(high[i], groups[i], groups[i + 2]);
    zip_low(fours[0], low[0], low[1]), zip_high(fours[1], low[0], low[1]);
    zip_low(fours[2], high[0], high[1]), zip_high(fours[3], high[0], high[1]);
    std::memcpy(out + at, fours, kBytes);
  }
}

// So many lanes at a time, each in a vector's lane.
constexpr int kAtOnce = 16;
constexpr int kWideWords = 4, kBlocks = 2;  // of a lane

template <int kBits>
[[gnu::always_inline]] inline void widen_lanes(std::uint8_t const* q, std::int64_t lanes, std::uint8_t* out) {
  for (; lanes > 0; lanes -= kAtOnce) {
    std::uint32_t in[kAtOnce * kBits], words[kBits][kAtOnce], wide[kWideWords][kAtOnce], result[kAtOnce * kWideWords];
    std::memcpy(in, q, sizeof(in));
    for (int i = 0; i < kAtOnce; ++i) {
      for (int word = 0; word < kBits; ++word) words[word][i] = in[kBits * i + word];
    }
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) {
      for (int i = 0; i < kAtOnce; ++i) {
        std::uint32_t block[narrow::block_words(kBits)] = {words[b][i]};
        if constexpr (kBits == 3) block[1] = words[2][i] >> (8 * b);
        wide[2 * b][i] = narrow::widened<kBits>(block, 0), wide[2 * b + 1][i] = narrow::widened<kBits>(block, 1);
      }
    }
    for (int i = 0; i < kAtOnce; ++i) {
      for (int word = 0; word < kWideWords; ++word) result[kWideWords * i + word] = wide[word][i];
    }
    std::memcpy(out, result, sizeof(result));
    q += sizeof(in), out += sizeof(result);
  }
}
EPILOQ_CLONES void widen2(std::uint8_t const* q, std::int64_t lanes, std::uint8_t* out) {
  widen_lanes<2>(q, lanes, out);
}
EPILOQ_CLONES void widen3(std::uint8_t const* q, std::int64_t lanes, std::uint8_t* out) {
  widen_lanes<3>(q, lanes, out);
}

}  // namespace

void widen_codes(std::uint8_t const* q, int bits, std::int64_t lanes, std::uint8_t* out) {
  bits == 2 ? widen2(q, lanes, out) : widen3(q, lanes, out);
}

PackedPanel::PackedPanel(Weight const& w, WeightFormat format, bool in_fours)
    : format_(format), fours_(in_fours ? w.groups * kPanelRows : 0) {
  std::size_t const count = static_cast<std::size_t>(w.groups + 1) * kPanelRows;
  scale.assign(count, 0.f), offset.assign(count, 0.f);
  bool const has_middle = w.offset == nullptr && format == WeightFormat::kInteger;
  zero.assign(count, has_middle ? static_cast<float>(1 << (w.bits - 1)) : 0.f);
  zero_bytes.assign(count, format == WeightFormat::kInteger ? kInEachByte << (w.bits - 1) : 0);
  if (read_bits(w.bits) != w.bits) widened_.resize(static_cast<std::size_t>(w.padded_k) * kPanelRows / 2);
}

void PackedPanel::read(Weight const& w, int panel) {
  q = w.q + panel * panel_bytes(w);
  if (!widened_.empty()) widen_codes(q, w.bits, std::int64_t{w.padded_k} / depth(w.bits) * kLanes, widened_.data());
  if (read_bits(w.bits) != w.bits) q = widened_.data();
  int const count = w.groups * kPanelRows;
  std::int64_t const first = static_cast<std::int64_t>(panel) * count;
  if (format_ == WeightFormat::kInteger) {
    read_row(w.scale, w.scale_dtype, first, count, scale.data());
  } else {
    auto* const read = format_ == WeightFormat::kMxfp4 ? read_e8m0 : read_packed_e4m3;
    auto const* bytes = static_cast<std::uint8_t const*>(w.scale) + first;
    if (!fours_.empty()) put_in_fours(bytes, count, fours_.data()), bytes = fours_.data();
    read(bytes, count, scale.data());
  }
  for (int i = 0; i < count && w.zero != nullptr; ++i) {
    zero[i] = w.zero[first + i], zero_bytes[i] = kInEachByte * w.zero[first + i];
  }
  if (w.offset != nullptr) read_row(w.offset, w.scale_dtype, first, count, offset.data());
}

}  // namespace epiloq::ops::weight_only_mm
