// The warp tile of the mma.sync weight-only kernels on a CPU (emulated/machine.h), for weights of 2, 3, 4 and 8 bits:
// copies to shared memory, conversion to fragments, products, scales, zero points and offsets of groups, against sums
// in double of the values that packed_layout.h defines. The stand-ins fail where a conversion rounds.

#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "core/half.h"
#include "kernels/common/ptx/cta.cuh"
#include "kernels/sm80/w4a16/warp_tile.cuh"
#include "packed_values.h"

using namespace epiloq;
using namespace epiloq::ops::weight_only_mm;

namespace {

std::uint16_t bits_of(__half, float value) { return float16_of_float(value); }
std::uint16_t bits_of(__nv_bfloat16, float value) { return bfloat16_of_float(value); }

enum class Parameters { kSymmetric, kZeros, kOffsets };

// Panels 1 and 2 of a weight of 40 rows, that is of three panels, by tiles of tokens.
template <class T, int kBits, int kGroups, Parameters kParameters, int kTiles>
struct Problem {
  static constexpr bool kOffsets = kParameters == Parameters::kOffsets;
  static constexpr int kPanels = 2, kFirstPanel = 1, kAllPanels = 3, kTokens = 8 * kTiles, kK = 2 * kStep;
  using W = Warp<T, kBits, kGroups, kOffsets, kPanels, kTiles>;

  int group, groups = (kK + group - 1) / group;
  DType scale_dtype;
  std::vector<std::uint8_t> q = std::vector<std::uint8_t>(kAllPanels * kPanelRows * kK * kBits / 8), zero, scale,
                            offset;
  std::vector<std::uint16_t> x = std::vector<std::uint16_t>(kTokens * kK);

  Problem(std::mt19937& random, int group_, DType scale_dtype_) : group(group_), scale_dtype(scale_dtype_) {
    auto const unit = [&] { return static_cast<float>(random() % 2001) / 1000.F - 1.F; };
    for (auto& byte : q) byte = static_cast<std::uint8_t>(random());
    for (auto& value : x) value = bits_of(T{}, unit());
    int const count = kAllPanels * groups * kPanelRows;
    if (kParameters == Parameters::kZeros) {
      for (int i = 0; i < count; ++i)
        zero.push_back(static_cast<std::uint8_t>(random() % ((1U << kBits) + (kBits < 8))));
    }
    auto const fill = [&](std::vector<std::uint8_t>& values) {
      for (int i = 0; i < count; ++i) {
        float const value = unit();
        std::uint16_t const half = scale_dtype == DType::kFloat16 ? float16_of_float(value) : bfloat16_of_float(value);
        int const bytes = scale_dtype == DType::kFloat32 ? 4 : 2;
        values.resize(values.size() + bytes);
        std::memcpy(&values[values.size() - bytes], bytes == 4 ? static_cast<void const*>(&value) : &half, bytes);
      }
    };
    fill(scale);
    if (kOffsets) fill(offset);
  }

  Weight weight() const {
    Weight w{};
    w.n = kAllPanels * kPanelRows - 8, w.k = w.padded_k = kK, w.bits = kBits;
    w.group = group, w.groups = groups;
    for (int columns = kStep; columns < group; columns *= 2) ++w.group_shift;
    w.q = q.data(), w.scale = scale.data(), w.scale_dtype = scale_dtype;
    w.zero = zero.empty() ? nullptr : zero.data();
    w.offset = offset.empty() ? nullptr : offset.data();
    return w;
  }

  double parameter(std::vector<std::uint8_t> const& values, int i) const {
    if (scale_dtype == DType::kFloat32) {
      float value;
      std::memcpy(&value, &values[4 * i], 4);
      return value;
    }
    std::uint16_t half;
    std::memcpy(&half, &values[2 * i], 2);
    return scale_dtype == DType::kFloat16 ? float_of_float16(half) : float_of_bfloat16(half);
  }

  // [token][row]
  std::vector<float> product() const {
    Weight const w = weight();
    StageLayout const layout = StageLayout::of(w, kPanels, kGroups);
    std::vector<float> sums(kTokens * kPanels * kPanelRows);
    unsigned const bytes = layout.bytes + kTokens * TokenLayout::kBytes;
    emulated::run({1, 32, 1, bytes}, [&] {
      typename W::Source const source(w, layout, kFirstPanel);
      SharedAddress const stage = shared_address(dynamic_smem), tokens = stage + layout.bytes;
      float part[kPanels][kTiles][4] = {};
      TokenLayout const place;
      for (int step = 0; step < kK / kStep; ++step) {
        source.issue(layout, stage, step);
        for (int i = W::lane(); i < kTokens * kStep / 8; i += 32) {
          int const token = i / (kStep / 8), chunk = i % (kStep / 8);
          cp_async16(tokens + TokenLayout::of(token, chunk), &x[token * kK + step * kStep + chunk * 8]);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp();
        W::multiply(part, w, layout, dynamic_smem, [&](int tile, int block) {
          return load_tokens(tokens + place.at(block) + tile * TokenLayout::kTile);
        });
        __syncwarp();
      }
      W::store(sums.data(), kPanels * kPanelRows, part);
    });
    return sums;
  }

  void check() const {
    std::vector<float> const sums = product();
    for (int row = 0; row < kPanels * kPanelRows; ++row) {
      int const panel = kFirstPanel + row / kPanelRows;
      std::vector<double> values(kK), scales(kK), offsets(kK);
      std::uint8_t const* lane = &q[panel * kPanelRows * kK * kBits / 8];
      for (int tile = 0; tile < kK; tile += depth(kBits)) {
        for (int l = 0; l < kLanes; ++l, lane += lane_bytes(kBits)) {
          for (int i = 0; i < lane_values(kBits); ++i) {
            auto const at = tile_coord_of(kBits, l, i);
            if (at.row != row % kPanelRows) continue;
            int const k = tile + at.column, p = (panel * groups + k / group) * kPanelRows + parameter_of(at.row);
            double const middle = zero.empty() ? 1 << (kBits - 1) : zero[p];
            values[k] = value_at(lane, kBits, i) - (kOffsets ? 0 : middle);
            scales[k] = parameter(scale, p);
            if (kOffsets) offsets[k] = parameter(offset, p);
          }
        }
      }
      for (int token = 0; token < kTokens; ++token) {
        double exact = 0, size = 0;
        for (int k = 0; k < kK; ++k) {
          T const value{x[token * kK + k]};
          double const product = scales[k] * values[k], token_value = static_cast<float>(value);
          exact += (product + offsets[k]) * token_value;
          size += (std::abs(product) + std::abs(offsets[k])) * std::abs(token_value);
        }
        // Each instruction rounds its sum, and each subtile's is added with its scale, and so with its offset.
        int const roundings = kK / 16 + 2 * kK / 16;
        double const error = std::abs(sums[token * kPanels * kPanelRows + row] - exact);
        CHECK(error <= roundings * std::ldexp(size, -24));
      }
    }
  }
};

template <class T, int kBits, int kGroups, Parameters kParameters, int kTiles>
void check_groups(std::mt19937& random) {
  for (int group : {kStep / kGroups, 2 * kStep}) {
    if (group > kStep && kGroups > 1) continue;
    constexpr DType kScales[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
    Problem<T, kBits, kGroups, kParameters, kTiles>(random, group, kScales[random() % 3]).check();
  }
}

template <class T, int kBits>
void check_bits(std::mt19937& random) {
  auto const check_parameters = [&]<Parameters kParameters>() {
    auto const check_all_groups = [&]<int... kGroups>(std::integer_sequence<int, kGroups...>) {
      (check_groups<T, kBits, kGroups, kParameters, 1>(random), ...);
      (check_groups<T, kBits, kGroups, kParameters, 4>(random), ...);
    };
    check_all_groups(std::integer_sequence<int, 1, 2, 4>{});
    if constexpr (kBits < 4) check_all_groups(std::integer_sequence<int, 8>{});
  };
  check_parameters.template operator()<Parameters::kSymmetric>();
  check_parameters.template operator()<Parameters::kZeros>();
  check_parameters.template operator()<Parameters::kOffsets>();
}

template <class T>
void check_type(std::mt19937& random) {
  check_bits<T, 2>(random);
  check_bits<T, 3>(random);
  check_bits<T, 4>(random);
  check_bits<T, 8>(random);
}

}  // namespace

int main() {
  auto random = test::generator();
  check_type<__half>(random);
  check_type<__nv_bfloat16>(random);
  return test::failures != 0;
}
