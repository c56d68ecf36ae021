// The warp tile of the GEMV kernel with FP4 weights on a CPU (emulated/machine.h): every code by every scale, exactly,
// and products of one and two tiles of tokens against sums in double.

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "core/half.h"
#include "kernels/common/ptx/cta.cuh"
#include "kernels/sm80/w4a16/warp_tile_fp4.cuh"
#include "packed_values.h"

using namespace epiloq;
using namespace epiloq::ops::weight_only_mm;

namespace {

std::uint16_t bits_of(__half, float value) { return float16_of_float(value); }
std::uint16_t bits_of(__nv_bfloat16, float value) { return bfloat16_of_float(value); }

// Both halves of each register are the nibble of its number; times a factor, code times scale.
template <class T, int kGroups>
void every_code_by_every_scale(std::mt19937& random) {
  using Scales = Fp4Scales<T, kGroups>;
  std::vector<int> bytes = nvfp4_bytes();
  if (kGroups == kMxfp4) {
    bytes.clear();
    for (int byte = 0; byte < 128; ++byte) bytes.push_back(byte);
  }
  bool const folds = Scales::kFolds;
  double const pattern_unit = std::is_same_v<T, __half> ? std::ldexp(1., 14) : std::ldexp(1., 126);
  for (int i = 0; i < 256; ++i) {
    Word const w = i < 16 ? static_cast<Word>(i) * 0x11111111U : static_cast<Word>(random());
    Word a[4];
    E2M1<T>::patterns(a, w);
    for (int p = 0; p < 4; ++p) {
      for (int half = 0; half < 2; ++half) {
        double const code = e2m1(w >> (4 * p + 16 * half) & 15);
        double const pattern = emulation::value_of<T>(a[p], half);
        CHECK_EQUAL(pattern * pattern_unit, code);
        CHECK_EQUAL(std::signbit(pattern), std::signbit(code));
      }
    }
    for (int byte : bytes) {
      if (!folds) break;
      for (int p = 0; p < 4; ++p) {
        Word const product = multiply_pairs(T{}, a[p], Scales::factor(byte));
        for (int half = 0; half < 2; ++half) {
          double const found = emulation::value_of<T>(product, half) * Scales::F::kUnit;
          CHECK_EQUAL(found, e2m1(w >> (4 * p + 16 * half) & 15) * fp4_scale(kGroups, byte));
        }
      }
    }
  }
  if constexpr (kGroups == kMxfp4) {
    for (int byte = 0; byte < kNanPower; ++byte) CHECK_EQUAL(Scales::power(byte), std::ldexp(1.F, byte - 127));
    CHECK(std::isnan(Scales::power(kNanPower)));
  } else {
    CHECK(std::isnan(emulation::value_of<T>(Scales::factor(kNanScale), 1)));
  }
}

enum class Bytes { kSmall, kLarge, kSmallest, kNan };

// All panels but the first of a weight of 8 rows less than one more panel than there are.
template <class T, int kGroups, int kPanels, int kTiles>
void products(std::mt19937& random, int tokens, Bytes kind) {
  constexpr int kFirstPanel = 1, kAllPanels = kFirstPanel + kPanels, kK = 2 * kStep, kColumns = kStep / kGroups;
  constexpr int kAllGroups = kK / kColumns, kRows = kPanels * kPanelRows;
  using W = Fp4Warp<T, kGroups, kPanels, kTiles>;
  std::vector<std::uint8_t> q(kAllPanels * kPanelRows * kK / 2), scale(kAllPanels * kAllGroups * kPanelRows);
  std::vector<std::uint16_t> x(8 * kTiles * kK);
  for (auto& byte : q) byte = static_cast<std::uint8_t>(random());
  for (auto& value : x) value = bits_of(T{}, static_cast<float>(random() % 2001) / 1000.F - 1.F);
  std::vector<int> const scales = nvfp4_bytes();
  for (auto& byte : scale) {
    int const small = kGroups == kMxfp4 ? 118 + static_cast<int>(random() % 8) : scales[random() % scales.size()];
    byte = static_cast<std::uint8_t>(small);
    if (kGroups == kMxfp4 && kind == Bytes::kLarge) byte += 20;
    if (kGroups == kMxfp4 && kind == Bytes::kSmallest) byte = static_cast<std::uint8_t>(random() % 2);
    if (kind == Bytes::kNan && random() % 16 == 0) byte = kGroups == kMxfp4 ? kNanPower : kNanScale;
  }
  Weight w{};
  w.n = kAllPanels * kPanelRows - 8, w.k = w.padded_k = kK, w.bits = 4, w.group = kColumns, w.groups = kAllGroups;
  w.q = q.data(), w.scale = scale.data(), w.scale_dtype = DType::kFloat8E4M3;
  StageLayout const layout = StageLayout::of(w, kPanels, kGroups);
  std::vector<float> sums(8 * kTiles * kRows);
  unsigned const shared = layout.bytes + 8 * kTiles * TokenLayout::kBytes;
  emulated::run({1, 32, 1, shared}, [&] {
    typename W::Source const source(w, layout, kFirstPanel);
    SharedAddress const stage = shared_address(dynamic_smem), at = stage + layout.bytes;
    typename W::Sums part = {};
    TokenLayout const place;
    for (int step = 0; step < kK / kStep; ++step) {
      source.issue(layout, stage, step);
      for (int i = W::lane(); i < 8 * kTiles * kStep / 8; i += 32) {
        int const token = i / (kStep / 8), chunk = i % (kStep / 8);
        cp_async16(at + TokenLayout::of(token, chunk), &x[token * kK + step * kStep + chunk * 8]);
      }
      cp_async_commit();
      cp_async_wait<0>();
      __syncwarp();
      W::multiply(part, W::step_of(dynamic_smem),
                  [&](int tile, int block) { return load_tokens(at + place.at(block) + tile * TokenLayout::kTile); });
      __syncwarp();
    }
    W::store(sums.data(), kRows, part, W::F::kUnit);
  });
  for (int row = 0; row < kRows; ++row) {
    int const panel = kFirstPanel + row / kPanelRows;
    std::vector<double> weights(kK);
    std::uint8_t const* lane = &q[panel * kPanelRows * kK / 2];
    for (int tile = 0; tile < kK; tile += depth(4)) {
      for (int l = 0; l < kLanes; ++l, lane += lane_bytes(4)) {
        for (int i = 0; i < lane_values(4); ++i) {
          auto const of = tile_coord_of(4, l, i);
          if (of.row != row % kPanelRows) continue;
          int const k = tile + of.column;
          int const byte = scale[(panel * kAllGroups + k / kColumns) * kPanelRows + parameter_of(of.row)];
          weights[k] = e2m1(value_at(lane, 4, i)) * fp4_scale(kGroups, byte);
        }
      }
    }
    for (int token = 0; token < tokens; ++token) {
      double exact = 0, size = 0;
      for (int k = 0; k < kK; ++k) {
        double const product = weights[k] * static_cast<float>(T{x[token * kK + k]});
        exact += product, size += std::abs(product);
      }
      float const found = sums[token * kRows + row];
      CHECK_EQUAL(std::isnan(found), std::isnan(exact));
      // Each instruction rounds its sum, and each group's is added with its scale; or by units of the smallest float.
      int const roundings = kK / 16 + 2 * kAllGroups;
      double const smallest = 0x1p-149 * W::F::kUnit;
      if (!std::isnan(exact)) CHECK(std::abs(found - exact) <= roundings * (std::ldexp(size, -24) + smallest));
    }
  }
}

template <class T, int kGroups>
void check_format(std::mt19937& random) {
  every_code_by_every_scale<T, kGroups>(random);
  for (Bytes kind : {Bytes::kSmall, Bytes::kLarge, Bytes::kSmallest, Bytes::kNan}) {
    products<T, kGroups, 2, 1>(random, 8, kind);
    products<T, kGroups, 4, 1>(random, 8, kind);
    products<T, kGroups, 4, 2>(random, 16, kind);
    products<T, kGroups, 8, 2>(random, 13, kind);
  }
}

}  // namespace

int main() {
  auto random = test::generator();
  check_format<__half, kMxfp4>(random);
  check_format<__half, kNvfp4>(random);
  check_format<__nv_bfloat16, kMxfp4>(random);
  check_format<__nv_bfloat16, kNvfp4>(random);
  return test::failures != 0;
}
