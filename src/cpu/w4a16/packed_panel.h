#pragma once

// A panel of a packed weight as the CPU's kernels read it.

#include <vector>

#include "epiloq/weight_only_mm.h"
#include "problems/packed_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

// Integers of 2 and 3 bits are read in the order of 4, to which they are widened a panel at a time.
constexpr int read_bits(int bits) { return bits == 8 ? 8 : 4; }

// Codes, and parameters as float32, which lie as in memory: [groups, 16] by parameter_of(row), with an additional group
// of zeros for columns past K, except those in the same K step as columns before K.
struct PackedPanel {
  std::uint8_t const* q = nullptr;  // of read_bits
  std::vector<float> scale, zero, offset;
  std::vector<std::uint64_t> zero_bytes;  // eight times each zero point

  PackedPanel() = default;
  // `in_fours`: of NVFP4, scales as [groups / 4, 16, 4].
  explicit PackedPanel(Weight const& weight, WeightFormat format = WeightFormat::kInteger, bool in_fours = false);
  void read(Weight const& weight, int panel);

 private:
  WeightFormat format_ = WeightFormat::kInteger;
  std::vector<std::uint8_t> fours_, widened_;
};

// `lanes` lanes of 2 or 3 bits (packed_layout.h) in the order of 4.
void widen_codes(std::uint8_t const* q, int bits, std::int64_t lanes, std::uint8_t* out);

}  // namespace epiloq::ops::weight_only_mm
