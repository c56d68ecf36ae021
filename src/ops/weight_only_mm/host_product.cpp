// Products of a few tokens on the CPU, straight from the packed weight: each integer is read from memory once.

#include <algorithm>
#include <vector>

#include "core/host_rows.h"
#include "ops/weight_only_mm/host.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr int kWidth = 32;

// A row's parameters, group by group.
struct Row {
  std::vector<float> scale, zero, offset;

  void read(Weight const& w, int row) {
    int const groups = (w.k + w.group - 1) / w.group;
    scale.resize(groups), zero.resize(groups), offset.resize(groups);
    for (int group = 0; group < groups; ++group) {
      Parameters const p = parameters_at(w, row / kSlab, group, row % kSlab);
      scale[group] = p.scale, zero[group] = p.zero, offset[group] = p.offset;
    }
  }
};

// sum_k scale (q - zero) x, in lanes that do not meet until the end: compilers may not reorder a float sum by
// themselves.
EPILOQ_CLONES float dot(std::uint8_t const* q, float const* x, int k, int group_size, float const* scale,
                        float const* zero) {
  float lanes[kWidth] = {}, rest = 0.f;
  for (int first = 0, group = 0; first < k; first += group_size, ++group) {
    float part[kWidth] = {};
    int const end = std::min(first + group_size, k);
    int i = first;
    for (; i + kWidth <= end; i += kWidth) {
      for (int l = 0; l < kWidth; ++l) part[l] += (static_cast<float>(q[i + l]) - zero[group]) * x[i + l];
    }
    for (; i < end; ++i) rest += scale[group] * (static_cast<float>(q[i]) - zero[group]) * x[i];
    for (int l = 0; l < kWidth; ++l) lanes[l] += scale[group] * part[l];
  }
  for (float lane : lanes) rest += lane;
  return rest;
}

EPILOQ_CLONES float sum_of(float const* x, int count) {
  float lanes[kWidth] = {}, rest = 0.f;
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    for (int l = 0; l < kWidth; ++l) lanes[l] += x[i + l];
  }
  for (; i < count; ++i) rest += x[i];
  for (float lane : lanes) rest += lane;
  return rest;
}

struct Tokens {
  std::vector<float> x;     // [m, k]
  std::vector<float> sums;  // [m, groups], where there are offsets

  Tokens(Problem const& p, DType dtype) : x(static_cast<std::size_t>(p.m) * p.weight.k) {
    Weight const& w = p.weight;
    for (int m = 0; m < p.m; ++m)
      read_row(p.x, dtype, m * p.stride_x, w.k, x.data() + static_cast<std::size_t>(m) * w.k);
    if (w.offset == nullptr) return;
    for (int m = 0; m < p.m; ++m) {
      for (int k = 0; k < w.k; k += w.group)
        sums.push_back(sum_of(&x[static_cast<std::size_t>(m) * w.k + k], std::min(w.group, w.k - k)));
    }
  }
};

// One row of the weight by a token.
float multiply(Problem const& p, Tokens const& tokens, std::uint8_t const* q, Row const& row, int m) {
  Weight const& w = p.weight;
  float sum = dot(q, &tokens.x[static_cast<std::size_t>(m) * w.k], w.k, w.group, row.scale.data(), row.zero.data());
  if (w.offset == nullptr) return sum;
  std::size_t const groups = row.offset.size();
  for (std::size_t group = 0; group < groups; ++group) sum += row.offset[group] * tokens.sums[m * groups + group];
  return sum;
}

}  // namespace

void multiply_on_host(Problem const& p, DType dtype) {
  Weight const& w = p.weight;
  if (multiplies4(w)) return multiply4_on_host(p, dtype);
  Tokens const tokens(p, dtype);
  std::vector<std::uint8_t> values(static_cast<std::size_t>(kSlab) * w.padded_k);
  std::vector<float> slab(static_cast<std::size_t>(p.m) * kSlab), bias(kSlab);
  Row row;
  for (int first = 0; first < w.n; first += kSlab) {
    int const rows = std::min(kSlab, w.n - first);
    unpack_slab(w, first / kSlab, values.data());
    if (p.bias != nullptr) read_row(p.bias, dtype, first, rows, bias.data());
    for (int i = 0; i < rows; ++i) {
      row.read(w, first + i);
      std::uint8_t const* const q = values.data() + static_cast<std::size_t>(i) * w.padded_k;
      for (int m = 0; m < p.m; ++m) {
        float const value = multiply(p, tokens, q, row, m) + bias[i];
        slab[m * kSlab + i] = value < p.lo ? p.lo : value > p.hi ? p.hi : value;
      }
    }
    for (int m = 0; m < p.m; ++m) write_row(&slab[m * kSlab], rows, dtype, p.out, m * p.stride_out + first);
  }
}

}  // namespace epiloq::ops::weight_only_mm
