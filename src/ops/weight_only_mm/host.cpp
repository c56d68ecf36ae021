// A packed weight on the CPU: the definition, a slab of rows at a time.

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "core/half.h"
#include "ops/weight_only_mm/kernels.h"
#include "ops/weight_only_mm/layout.h"

namespace epiloq::ops::weight_only_mm {
namespace {

// Where a tile's values go, in the order in which they lie: row * padded_k + column, without the tile's own column.
template <int kBits>
struct Places {
  static constexpr int kCount = kSlab * depth(kBits);
  std::array<std::uint8_t, kCount> row, column;

  constexpr Places() : row{}, column{} {
    for (int i = 0; i < kCount; ++i) {
      Place const place = place_of(kBits, i / lane_values(kBits), i % lane_values(kBits));
      row[i] = static_cast<std::uint8_t>(place.row);
      column[i] = static_cast<std::uint8_t>(place.column);
    }
  }
};

template <int kBits>
void unpack_slab(std::uint8_t const* q, int padded_k, std::uint8_t* values) {
  static constexpr Places<kBits> kPlaces;
  constexpr int kValues = lane_values(kBits);
  for (int first = 0; first < padded_k; first += depth(kBits)) {
    for (int lane = 0; lane < kLanes; ++lane, q += lane_bytes(kBits)) {
      for (int i = 0; i < kValues; ++i) {
        int const at = lane * kValues + i;
        values[kPlaces.row[at] * padded_k + first + kPlaces.column[at]] =
            static_cast<std::uint8_t>(value_at(q, kBits, i));
      }
    }
  }
}

void unpack_slab(int bits, std::uint8_t const* q, int padded_k, std::uint8_t* values) {
  constexpr void (*kUnpack[])(std::uint8_t const*, int, std::uint8_t*) = {unpack_slab<2>, unpack_slab<3>,
                                                                          unpack_slab<4>, unpack_slab<8>};
  kUnpack[std::min(bits - 2, 3)](q, padded_k, values);
}

float read(void const* values, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kFloat16:
      return float_of_float16(static_cast<std::uint16_t const*>(values)[i]);
    case DType::kBFloat16:
      return float_of_bfloat16(static_cast<std::uint16_t const*>(values)[i]);
    default:
      return static_cast<float const*>(values)[i];
  }
}

void write(float const* row, int count, DType dtype, void* out, std::int64_t first) {
  switch (dtype) {
    case DType::kFloat16:
      std::transform(row, row + count, static_cast<std::uint16_t*>(out) + first, float16_of_float);
      break;
    case DType::kBFloat16:
      std::transform(row, row + count, static_cast<std::uint16_t*>(out) + first, bfloat16_of_float);
      break;
    default:
      std::copy_n(row, count, static_cast<float*>(out) + first);
  }
}

struct Parameters {
  float scale, zero, offset;
};

Parameters parameters_at(Weight const& w, int slab, int group, int row) {
  std::int64_t const i = (static_cast<std::int64_t>(slab) * w.groups + group) * kSlab + parameter_of(row);
  float const middle = static_cast<float>(1 << (w.bits - 1));
  Parameters p{read(w.scale, w.scale_dtype, i), w.zero != nullptr ? static_cast<float>(w.zero[i]) : middle, 0.f};
  if (w.offset != nullptr) p = {p.scale, 0.f, read(w.offset, w.scale_dtype, i)};
  return p;
}

// q - zero is exact; then a product and a sum, each rounded (-ffp-contract=off).
EPILOQ_CLONES void restore(std::uint8_t const* q, int count, Parameters p, float* out) {
  for (int i = 0; i < count; ++i) out[i] = p.scale * (static_cast<float>(q[i]) - p.zero) + p.offset;
}

}  // namespace

void dequantize_on_host(DequantizeProblem const& problem) {
  Weight const& w = problem.weight;
  std::vector<std::uint8_t> values(static_cast<std::size_t>(kSlab) * w.padded_k);
  std::vector<float> row(w.k);
  std::int64_t const slab_bytes = static_cast<std::int64_t>(w.padded_k) / depth(w.bits) * kLanes * lane_bytes(w.bits);
  for (int n = 0; n < w.n; ++n) {
    int const slab = n / kSlab, in_slab = n % kSlab;
    if (in_slab == 0) unpack_slab(w.bits, w.q + slab * slab_bytes, w.padded_k, values.data());
    std::uint8_t const* const q = values.data() + static_cast<std::size_t>(in_slab) * w.padded_k;
    for (int k = 0, group = 0; k < w.k; k += w.group, ++group) {
      restore(q + k, std::min(w.group, w.k - k), parameters_at(w, slab, group, in_slab), row.data() + k);
    }
    write(row.data(), w.k, problem.out_dtype, problem.out, static_cast<std::int64_t>(n) * w.k);
  }
}

}  // namespace epiloq::ops::weight_only_mm
