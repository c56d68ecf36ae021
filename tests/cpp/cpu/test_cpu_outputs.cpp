// float32 values rounded by vectors, with the instructions of every machine that this one can be.

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "check.h"
#include "core/half.h"
#include "cpu/common/outputs.h"
#include "cpu/isa/versions.h"

using namespace epiloq;

namespace {

constexpr int kMost = kOutputBlock;
constexpr std::uint16_t kPoison = 0x5a5a;

struct Sixteen {
  float values[kMost];
  int count;
  std::uint16_t out[kMost];
};

template <DType kType>
struct Put {
  template <int kLanes>
  struct Kernel {
    [[gnu::always_inline]] static void run(Sixteen& s) { put<kType, kLanes>(s.values, s.count, s.out); }
  };
};

template <DType kType>
std::vector<void (*)(Sixteen&)> versions() {
  using All = Versions<Put<kType>::template Kernel, Sixteen&>;
  std::vector<void (*)(Sixteen&)> versions{All::plain};
#ifdef EPILOQ_HAS_CLONES
  if (lanes_here() >= 8) versions.push_back(All::v3);
  if (lanes_here() >= 16) versions.push_back(All::v4);
#endif
  return versions;
}

template <DType kType>
void check_all(std::uint16_t (*rounded)(float)) {
  std::mt19937 random(std::random_device{}());
  for (auto const run : versions<kType>()) {
    for (std::uint32_t upper = 0; upper < 1u << 16; ++upper) {
      std::uint32_t const r = random();
      std::uint32_t const lower[] = {0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff, r & 0xffff, r >> 16};
      Sixteen s{};
      for (int i = 0; i < kMost; ++i) s.values[i] = std::bit_cast<float>(upper << 16 | lower[i % std::size(lower)]);
      s.count = static_cast<int>(1 + random() % kMost);
      std::fill_n(s.out, kMost, kPoison);
      run(s);
      for (int i = 0; i < kMost; ++i) CHECK_EQUAL(s.out[i], i < s.count ? rounded(s.values[i]) : kPoison);
    }
  }
}

}  // namespace

int main() {
  check_all<DType::kBFloat16>(bfloat16_of_float);
  check_all<DType::kFloat16>(float16_of_float);
  return test::failures != 0;
}
