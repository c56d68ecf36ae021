// The group-wise kernel of SM90 with all of its tiles, on a CPU (emulated/machine.h): random problems, each in a random
// schedule. All sums are exact in fp32, so that every bit of D and of the memory around it is known. Arguments: the
// number of problems per tile, and a printed seed.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "core/half.h"
#include "dispatch/groupwise_mm/tables.h"
#include "kernels/sm90/groupwise_gemm.cuh"

using namespace epiloq;
using gemm::GroupwiseProblem;
using gemm::Scales;
using namespace ops::groupwise_mm;

namespace {

constexpr unsigned char kPoison = 0xd7;

// The kernel of a problem.
struct Kernel {
  gemm::GroupwiseConfig tile;
  Scales scales;
  DType element, out;
  bool has_zero_point;
  gemm::GroupwiseLaunch launch;
  int (*split_tiles)(GroupwiseProblem const&, int sm_count);
};
template <class Out>
constexpr DType kOutOf = std::is_same_v<Out, float>    ? DType::kFloat32
                         : std::is_same_v<Out, __half> ? DType::kFloat16
                                                       : DType::kBFloat16;

// A row of a table, with one type of D and, for int8, one epilogue.
template <GroupwiseConfig kTile, int kRow, Scales kScales, class Element>
Kernel kernel_of() {
  constexpr bool kTransposesD = kScales == Scales::kColumnsOfWholeRows;
  using Out = std::tuple_element_t<kRow % (kTransposesD ? 2 : 3), std::tuple<__nv_bfloat16, __half, float>>;
  constexpr bool kHasZeroPoint = std::is_same_v<Element, std::int8_t> && kRow % 2 == 1;
  using Epilogue = std::conditional_t<kHasZeroPoint, epilogue::ScaledAzp, epilogue::Scaled>;
  using Gemm = gemm::GroupwiseGemm<
      gemm::Groupwise<kTile.m_groups, kTile.k_groups, kTile.n, kTile.rounds, kScales, Element, Out, Epilogue>>;
  DType const element = std::is_same_v<Element, std::int8_t> ? DType::kInt8 : DType::kFloat8E4M3;
  auto const split_tiles = [](GroupwiseProblem const& p, int sm_count) {
    return Gemm::split_tile_count(kTransposesD ? Gemm::transposed(p) : p, sm_count);
  };
  return {kTile, kScales, element, kOutOf<Out>, kHasZeroPoint, Gemm::launch, split_tiles};
}
template <auto const& kTable, Scales kScales, class Element>
void add_all(std::vector<Kernel>& kernels) {
  [&]<std::size_t... kRows>(std::index_sequence<kRows...>) {
    (kernels.push_back(kernel_of<kTable[kRows].config, kRows, kScales, Element>()), ...);
  }(std::make_index_sequence<kTable.size()>{});
}

using Random = std::mt19937;
int below(Random& random, int end) { return static_cast<int>(random() % end); }
int between(Random& random, int first, int last) { return first + below(random, last - first + 1); }
bool maybe(Random& random) { return below(random, 2) == 0; }

std::vector<float> powers_of_two(Random& random, std::int64_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = std::ldexp(1.f, between(random, -2, 2));
  return values;
}

// A matrix of small integers, and its codes with what must not be read behind each row.
struct Operand {
  int rows, depth, stride;
  std::vector<std::int8_t> values;
  std::vector<unsigned char> codes;

  Operand(Random& random, DType element, int rows_, int depth_)
      : rows(rows_), depth(depth_), stride(depth_ + 16 * below(random, 2)) {
    constexpr unsigned char kCodes[] = {0x00, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c, 0x4e};  // of 0 to 7
    values.resize(std::size_t(rows) * depth);
    codes.assign(std::size_t(rows) * stride, 0x7f);
    for (int row = 0; row < rows; ++row) {
      for (int k = 0; k < depth; ++k) {
        int const value = element == DType::kInt8 ? between(random, -128, 127) : between(random, -7, 7);
        values[std::size_t(row) * depth + k] = static_cast<std::int8_t>(value);
        codes[std::size_t(row) * stride + k] =
            element == DType::kInt8 ? static_cast<unsigned char>(value) : kCodes[std::abs(value)] | (value < 0) << 7;
      }
    }
  }
  std::int8_t const* row(int index) const { return values.data() + std::size_t(index) * depth; }
};

void store(DType out, double exact, unsigned char* to) {
  float const value = static_cast<float>(exact);
  std::uint16_t const half = out == DType::kFloat16 ? float16_of_float(value) : bfloat16_of_float(value);
  out == DType::kFloat32 ? std::memcpy(to, &value, 4) : std::memcpy(to, &half, 2);
}

// A random problem, its operands, and D as it must be.
class Trial {
 public:
  Trial(Kernel const& kernel, unsigned seed)
      : kernel_(kernel),
        random_(seed),
        sm_count_(maybe(random_) ? 2 : between(random_, 3, 6)),
        experts_(kernel.scales != Scales::kColumnsOfWholeRows && below(random_, 3) == 0 ? 3 : 1) {
    // Half of the time enough of K to wrap around the pipeline in one tile or, at large M, in two. Of pairs
    // sometimes so much that many steps follow one another.
    bool const is_few = kernel.tile.tokens() == 64, is_deep = kernel.tile.rounds > 1 && below(random_, 4) == 0;
    bool const is_small = is_deep || below(random_, is_few ? 2 : 4) == 0;
    int const most = kernel.tile.n * (is_small ? 1 : 3);
    p_.m = between(random_, 1, is_small ? kernel.tile.tokens() : kernel.tile.tokens() * (experts_ == 1 ? 5 : 3) / 2);
    p_.n = below(random_, 4) > 0 ? 8 * between(random_, 1, most / 8) : between(random_, 1, most);
    if (below(random_, 4) == 0) p_.n = (p_.n + kernel.tile.n - 1) / kernel.tile.n * kernel.tile.n;
    if (below(random_, 4) == 0) p_.m = (p_.m + kernel.tile.tokens() - 1) / kernel.tile.tokens() * kernel.tile.tokens();
    p_.k = 16 * (is_deep          ? between(random_, 200, 400)
                 : maybe(random_) ? between(random_, 1, 50)
                 : is_few         ? between(random_, 150, 250)
                                  : between(random_, 40, 80));
    if (kernel.scales == Scales::kColumnsOfWholeRows) std::swap(p_.m, p_.n);  // whose tiles are of D^T
    p_.experts = experts_;
    choose_rows();
    a_ = std::make_unique<Operand>(random_, kernel.element, token_rows_, p_.k);
    b_ = std::make_unique<Operand>(random_, kernel.element, experts_ * p_.n, p_.k);
    p_.a = a_->codes.data(), p_.stride_a = a_->stride;
    p_.b = b_->codes.data(), p_.stride_b = b_->stride;
    choose_scales();
    choose_epilogue();
    choose_output();
    p_.constant_b = experts_ == 1 && maybe(random_);
    if (experts_ == 1 && kernel.split_tiles(p_, sm_count_) > 0 && maybe(random_)) p_.split_k = 2;
  }

  void run(unsigned seed) {
    emulated::reseed(seed);
    try {
      kernel_.launch(p_, sm_count_, nullptr);
    } catch (std::exception const& error) {
      return test::report(__FILE__, __LINE__, describe() + error.what());
    }
    expect();
    auto const wrong = std::mismatch(d_.begin(), d_.end(), expected_.begin()).first - d_.begin();
    if (wrong == std::ssize(d_)) return;
    std::int64_t const element = (wrong - first_ * size_of(kernel_.out)) / size_of(kernel_.out);
    test::report(__FILE__, __LINE__,
                 describe() + "wrong at row " + std::to_string(element / p_.stride_d) + ", column " +
                     std::to_string(element % p_.stride_d));
  }

 private:
  // Rows of tokens: an expert's, which may be none.
  void choose_rows() {
    token_rows_ = p_.m;
    if (experts_ == 1) return;
    for (int expert = 0; expert < experts_; ++expert) counts_.push_back(maybe(random_) ? between(random_, 0, p_.m) : 0);
    if (maybe(random_)) {
      p_.masked_m = counts_.data();
      token_rows_ = experts_ * p_.m;
    } else {
      for (int expert = 1; expert < experts_; ++expert) counts_[expert] += counts_[expert - 1];
      p_.offs = counts_.data();
      p_.m = token_rows_ = counts_.back() + between(random_, 1, 3);
    }
  }

  void choose_scales() {
    bool const whole = kernel_.scales == Scales::kPerRowScales;
    auto const in_fours = [](int count) { return (count + 3) / 4 * 4; };
    if (kernel_.scales == Scales::kColumnsOfWholeRows) {
      int const groups = (p_.k + 127) / 128, column = in_fours(p_.n);
      bool const for_tma = maybe(random_);
      p_.scale_a.stride_row = below(random_, 2);
      p_.scale_b.stride_row = for_tma ? 1 : groups, p_.scale_b.stride_k = for_tma ? column : 1;
      scale_a_ = powers_of_two(random_, p_.m), scale_b_ = powers_of_two(random_, std::int64_t{column} * groups);
      p_.scale_a.ptr = scale_a_.data(), p_.scale_b.ptr = scale_b_.data();
      return;
    }
    int const groups = whole ? 1 : (p_.k + 127) / 128, line = in_fours(groups), column = in_fours(token_rows_);
    p_.depth = whole ? p_.k : 128;
    p_.scale_a.shift = !whole && experts_ == 1 && below(random_, 4) == 0 ? 7 : 0;
    bool const for_tma = maybe(random_);
    p_.scale_a.stride_row = whole ? below(random_, 2) : for_tma ? 1 : groups;
    p_.scale_a.stride_k = for_tma ? column : 1;
    scale_a_ = powers_of_two(random_, std::int64_t{column} * line);
    p_.scale_b.shift = kernel_.scales == Scales::kBlocks ? 7 : 0;
    p_.scale_b.stride_row = whole ? below(random_, 2) : for_tma ? line : groups, p_.scale_b.stride_k = 1;
    int const rows = p_.scale_b.shift == 7 ? (p_.n + 127) / 128 : p_.n, stride = p_.scale_b.stride_row;
    p_.scale_b_expert = rows * stride;
    // Nobody reads between those that there are, nor behind the last.
    scale_b_.assign(std::size_t(experts_) * rows * std::max(stride, groups), std::nanf(""));
    for (int row = 0; row < experts_ * rows; ++row) {
      std::ranges::copy(powers_of_two(random_, groups), scale_b_.begin() + std::ptrdiff_t{row} * stride);
    }
    p_.scale_a.ptr = scale_a_.data(), p_.scale_b.ptr = scale_b_.data();
  }

  void choose_epilogue() {
    if (maybe(random_)) {
      bias_.resize(std::size_t(p_.n) * size_of(kernel_.out));
      for (int i = 0; i < p_.n; ++i) {
        bias_values_.push_back(between(random_, -100, 100));
        store(kernel_.out, bias_values_[i], bias_.data() + std::size_t(i) * size_of(kernel_.out));
      }
      p_.bias = bias_.data();
    }
    if (!kernel_.has_zero_point) return;
    for (int i = 0; i < p_.n; ++i) azp_adj_.push_back(between(random_, -5000, 5000));
    for (int i = 0; i < token_rows_; ++i) azp_.push_back(between(random_, -128, 127));
    p_.azp_adj = azp_adj_.data();
    if (maybe(random_)) p_.azp = azp_.data(), p_.azp_stride = below(random_, 2);
  }

  // In the midst of poison; on lines of 16 bytes, or anywhere.
  void choose_output() {
    int const unit = 16 / size_of(kernel_.out);
    bool const on_lines = below(random_, 4) > 0;
    p_.stride_d = on_lines ? (p_.n + unit - 1) / unit * unit + unit * below(random_, 2) : p_.n + below(random_, 3);
    first_ = on_lines ? 2 * unit : 3;
    d_.assign((token_rows_ * p_.stride_d + 2 * first_) * size_of(kernel_.out), kPoison);
    expected_ = d_;
    p_.d = d_.data() + first_ * size_of(kernel_.out);
  }

  double product(int row, int weight_row, int expert, int column) const {
    std::int8_t const *const a = a_->row(row), *const b = b_->row(weight_row);
    double sum = 0;
    for (int begin = 0, group = 0; begin < p_.k; begin += p_.depth, ++group) {
      std::int32_t of_group = 0;
      for (int k = begin; k < std::min(begin + p_.depth, p_.k); ++k) of_group += a[k] * b[k];
      if (p_.azp_adj != nullptr) of_group -= (p_.azp == nullptr ? 1 : p_.azp[row * p_.azp_stride]) * p_.azp_adj[column];
      auto const scale = [group](gemm::GroupScales const& of, int expert_scale, int index) {
        return of.ptr[expert_scale + (index >> of.shift) * of.stride_row + group * of.stride_k];
      };
      double const of_weights = scale(p_.scale_b, expert * p_.scale_b_expert, column);
      sum += of_weights * scale(p_.scale_a, 0, row) * of_group;
    }
    return sum;
  }

  void expect() {
    for (int expert = 0; expert < experts_; ++expert) {
      int begin = 0, end = p_.m;
      if (p_.offs != nullptr) begin = expert == 0 ? 0 : p_.offs[expert - 1], end = p_.offs[expert];
      if (p_.masked_m != nullptr) begin = expert * p_.m, end = begin + p_.masked_m[expert];
      for (int row = begin; row < end; ++row) {
        for (int column = 0; column < p_.n; ++column) {
          double const bias = p_.bias == nullptr ? 0 : bias_values_[column];
          store(kernel_.out, product(row, expert * p_.n + column, expert, column) + bias,
                expected_.data() + (first_ + row * p_.stride_d + column) * size_of(kernel_.out));
        }
      }
    }
  }

  std::string describe() const {
    std::ostringstream text;
    text << "tile {" << kernel_.tile.m_groups << ", " << kernel_.tile.k_groups << ", " << kernel_.tile.n << ", "
         << kernel_.tile.rounds << "} " << (kernel_.element == DType::kInt8 ? "int8" : "float8") << ", " << p_.m
         << " x " << p_.n << " x " << p_.k << ", " << experts_ << " experts, " << sm_count_ << " SMs, k_blocks "
         << p_.split_k << ": ";
    return text.str();
  }

  Kernel const& kernel_;
  Random random_;
  int sm_count_, experts_, token_rows_ = 0;
  GroupwiseProblem p_;
  std::unique_ptr<Operand> a_, b_;
  std::vector<std::int32_t> counts_, azp_adj_, azp_;
  std::vector<float> scale_a_, scale_b_;
  std::vector<int> bias_values_;
  std::vector<unsigned char> bias_, d_, expected_;
  std::int64_t first_ = 0;  // element of D
};

}  // namespace

int main(int count, char** arguments) {
  Random random = count > 2 ? Random(std::strtoul(arguments[2], nullptr, 10)) : test::generator();
  int const problems = count > 1 ? std::atoi(arguments[1]) : 9;
  std::vector<Kernel> kernels;
  add_all<kTiles, Scales::kBlocks, cutlass::float_e4m3_t>(kernels);
  add_all<kColumnScaleTiles, Scales::kColumns, cutlass::float_e4m3_t>(kernels);
  add_all<kTransposedTiles, Scales::kColumnsOfWholeRows, cutlass::float_e4m3_t>(kernels);
  add_all<kInt8RowTiles, Scales::kPerRowScales, std::int8_t>(kernels);
  add_all<kFloat8RowTiles, Scales::kPerRowScales, cutlass::float_e4m3_t>(kernels);
  // In float32 two rounds of a tile have more parts than slots.
  constexpr int kInFloat32 = 2;
  kernels.push_back(kernel_of<kTiles.back().config, kInFloat32, Scales::kBlocks, cutlass::float_e4m3_t>());
  for (Kernel const& kernel : kernels) {
    for (int i = 0; i < problems * 128 / kernel.tile.tokens(); ++i) {
      unsigned const seed = random();
      Trial(kernel, seed).run(seed);
    }
  }
  return test::failures != 0;
}
