// Products on the CPU, a slab of weight rows at a time, slabs shared among threads.

#include <algorithm>
#include <cstring>

#include "core/host_rows.h"
#include "core/threads.h"
#include "ops/weight_only_mm/host.h"

namespace epiloq::ops::weight_only_mm {
namespace {

// Products of a weight and a token that are worth a thread: a few microseconds, which it takes to wake one.
constexpr std::int64_t kWorth = 1 << 16;

int threads_for(Problem const& p, int threads) {
  std::int64_t const work = static_cast<std::int64_t>(p.weight.n) * p.weight.k * p.m;
  return static_cast<int>(std::clamp<std::int64_t>(work / kWorth, 1, std::max(threads, 1)));
}

// sums [m] become a slab's columns of D.
void finish(Problem const& p, DType dtype, int slab, Line* sums) {
  int const first = slab * kSlab, rows = std::min(kSlab, p.weight.n - first);
  float bias[kSlab] = {};
  if (p.bias != nullptr) read_row(p.bias, dtype, first, rows, bias);
  for (int m = 0; m < p.m; ++m) {
    float* const row = sums[m].values;
    for (int i = 0; i < kSlab; ++i) {
      float const value = row[i] + bias[i];
      row[i] = value < p.lo ? p.lo : value > p.hi ? p.hi : value;
    }
    write_row(row, rows, dtype, p.out, m * p.stride_out + first);
  }
}

}  // namespace

SlabParameters::SlabParameters(Weight const& w) {
  std::size_t const count = static_cast<std::size_t>(w.groups + 1) * kSlab;
  scale.assign(count, 0.f), offset.assign(count, 0.f);
  zero.assign(count, w.offset != nullptr ? 0.f : static_cast<float>(1 << (w.bits - 1)));
}

void SlabParameters::read(Weight const& w, int slab) {
  int const count = w.groups * kSlab;
  std::int64_t const first = static_cast<std::int64_t>(slab) * count;
  read_row(w.scale, w.scale_dtype, first, count, scale.data());
  if (w.zero != nullptr) std::copy_n(w.zero + first, count, zero.begin());
  if (w.offset != nullptr) read_row(w.offset, w.scale_dtype, first, count, offset.data());
}

std::vector<int> groups_of(Weight const& w, int step) {
  std::vector<int> groups(w.padded_k / step, w.groups * kSlab);
  int at = 0, end = w.group;
  for (int k = 0; k < w.k; k += step) {
    if (k >= end) end += w.group, at += kSlab;
    groups[k / step] = at;
  }
  return groups;
}

std::string describe_on_host(Problem const& p) {
  return is_for_few(p) ? "cpu, packed integers in registers" : "cpu, 16 rows of the weight de-quantised at a time";
}

void multiply_on_host(Problem const& p, DType dtype, int threads) {
  threads = threads_for(p, threads);
  auto const by_slabs = [&](auto const& tokens, auto multiply) {
    share((p.weight.n + kSlab - 1) / kSlab, threads, [&](int first, int last) {
      SlabParameters parameters(p.weight);
      std::vector<Line> sums(p.m + kFewTokens);
      for (int slab = first; slab < last; ++slab) {
        parameters.read(p.weight, slab);
        multiply(p, tokens, parameters, slab, sums.data());
        finish(p, dtype, slab, sums.data());
      }
    });
  };
  if (is_for_few(p)) return by_slabs(FewTokens(p, dtype), multiply_few);
  by_slabs(ManyTokens(p, dtype, threads), multiply_many);
}

}  // namespace epiloq::ops::weight_only_mm
