// int8 products of the CPU: panels with the instructions of every machine that this one can be, and whole products.

#include <algorithm>
#include <array>
#include <vector>

#include "check.h"
#include "cpu/gemm/int8_amx.h"
#include "cpu/gemm/int8_panel.h"
#include "epiloq/host_int8.h"

using namespace epiloq;

namespace {

struct Operands {
  int m, n, k;
  std::int64_t stride_a, stride_b;
  std::vector<std::int8_t> a = std::vector<std::int8_t>(m * stride_a), b = std::vector<std::int8_t>(n * stride_b);

  Operands(std::mt19937& random, int m_, int n_, int k_, int more)
      : m(m_), n(n_), k(k_), stride_a(k + more % 5), stride_b(k + more % 7) {
    for (auto& value : a) value = static_cast<std::int8_t>(random());
    for (auto& value : b) value = static_cast<std::int8_t>(random());
  }
  std::int32_t exact(int row, int column) const {
    std::int32_t sum = 0;
    for (int i = 0; i < k; ++i) sum += a[row * stride_a + i] * b[column * stride_b + i];
    return sum;
  }
};

template <class Bytes>
void check_panel(Operands const& o, void (*run)(Int8PanelByTokens const&, std::int32_t*)) {
  constexpr int kRows = Bytes::kRows;
  int const columns = std::min(o.n, kRows), words = (o.k + 3) / 4 * Bytes::kWords;
  std::vector<std::int32_t> x(o.m * words), sums(o.m * kRows);
  for (int m = 0; m < o.m; ++m) {
    in_words<Bytes::kWords>(&o.a[m * o.stride_a], o.k, x.data() + m * words);
    std::int32_t total = 0;
    for (int i = 0; i < o.k; ++i) total += o.a[m * o.stride_a + i];
    std::fill_n(&sums[m * kRows], kRows, -128 * total);
  }
  run({.weight = o.b.data(),
       .stride = o.stride_b,
       .rows = columns,
       .k = o.k,
       .x = x.data(),
       .stride_x = words,
       .m = o.m},
      sums.data());
  for (int m = 0; m < o.m; ++m) {
    for (int n = 0; n < columns; ++n) CHECK_EQUAL(sums[m * kRows + n], o.exact(m, n));
  }
}

template <class Bytes>
void check_version(Operands const& o) {
  check_panel<Bytes>(o, ByteVersions<MultiplyInt8, Int8PanelByTokens const&, std::int32_t*>::of(Bytes{}));
}

#ifdef EPILOQ_HAS_CLONES
void check_tiles(Operands const& o) {
  Int8Product const p{o.m, o.n, o.k, o.a.data(), o.b.data(), o.stride_a, o.stride_b};
  TokenTiles const tiles{Int8InTiles::lines(o.k), o.m};
  std::vector<Line> tokens(tiles.size()), sums(tiles.count() * Int8InTiles::kRows);
  for (int i = 0; i < tiles.count(); ++i) Int8InTiles::arrange(p, tiles, i, tokens.data());
  Int8InTiles::run(p, 0, tokens.data(), tiles, 0, o.m, sums.data());
  auto const* const found = reinterpret_cast<std::int32_t const*>(sums.data());
  for (int m = 0; m < o.m; ++m) {
    for (int n = 0; n < o.n; ++n) CHECK_EQUAL(found[m * Int8InTiles::kRows + n], o.exact(m, n));
  }
}
#endif

void every_machine(Operands const& o) {
  check_version<PlainBytes>(o);
#ifdef EPILOQ_HAS_CLONES
  if (__builtin_cpu_supports("x86-64-v3")) check_version<PairedBytes>(o);
  if (__builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vnni")) check_version<VnniBytes>(o);
  if (has_int8_tiles()) check_tiles(o);
#endif
}

void panels_are_exact() {
  auto random = test::generator();
  for (int m : {1, 2, 5, 8, 16, 17, 31, 32, 33, 47, 71}) {
    for (int k : {1, 2, 3, 4, 63, 64, 65, 127, 511, 512, 513, 1023, 1024, 1025, 2100}) {
      every_machine({random, m, 1 + static_cast<int>(random() % 32), k, static_cast<int>(random() % 35)});
    }
  }
}

// Sums of unsigned weights pass 32 bits on the way.
void the_longest_sums() {
  auto random = test::generator();
  for (int m : {1, 3, 16, 35}) {
    for (int x : {-128, 127}) {
      Operands o(random, m, 2, 131071, 0);
      std::fill(o.a.begin(), o.a.end(), static_cast<std::int8_t>(x));
      std::fill_n(o.b.begin(), o.k, std::int8_t{-128}), std::fill_n(o.b.begin() + o.stride_b, o.k, std::int8_t{127});
      every_machine(o);
    }
  }
}

void whole_products() {
  auto random = test::generator();
  for (auto const& [m, n, k] : {std::array{1, 70, 100},
                                {3, 33, 64},
                                {16, 40, 64},
                                {600, 40, 36},
                                {527, 33, 128},
                                {1030, 5, 7},
                                {2, 2, 0},
                                {20, 3, 0}}) {
    Operands o(random, m, n, k, static_cast<int>(random() % 35));
    std::vector<std::int32_t> out(m * n, 0x5a5a5a5a);
    auto const view = [](auto& values, DType dtype, int rows, int columns, std::int64_t stride) {
      TensorView tensor(values.data(), dtype, {}, {rows, columns});
      tensor.strides[0] = stride;
      return tensor;
    };
    multiply_int8(view(out, DType::kInt32, m, n, n), view(o.a, DType::kInt8, m, k, o.stride_a),
                  view(o.b, DType::kInt8, n, k, o.stride_b), 2);
    for (int i = 0; i < m * n; ++i) CHECK_EQUAL(out[i], o.exact(i / n, i % n));
  }
}

}  // namespace

int main() {
  panels_are_exact();
  the_longest_sums();
  whole_products();
  return test::failures != 0;
}
