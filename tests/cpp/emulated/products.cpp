// wgmma.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <tuple>

#include "core/float8.h"
#include "machine.h"
#include "state.h"

namespace emulated {
namespace {

constexpr int kDepth = 32, kRows = 16;         // bytes of K, and rows of a warp, an instruction
constexpr std::uint32_t kPoison = 0xffedcba9;  // a NaN

template <class Format>
float decoded(unsigned code) {
  constexpr unsigned kMantissas = 1u << Format::kMantissaBits;
  unsigned const exponent = (code & 0x7f) / kMantissas, mantissa = code % kMantissas;
  float const magnitude =
      std::ldexp(static_cast<float>(exponent == 0 ? mantissa : kMantissas + mantissa),
                 static_cast<int>(exponent == 0 ? 1 : exponent) - Format::kBias - Format::kMantissaBits);
  bool const is_finite = magnitude <= Format::kMax;
  return is_finite ? (code < 0x80 ? magnitude : -magnitude) : NAN;
}

using Values = std::array<float, 256>;  // of all codes
Values const& values_of(Element element) {
  static auto const tables = [] {
    std::array<Values, 3> made;
    for (unsigned code = 0; code < 256; ++code) {
      made[static_cast<int>(Element::kInt8)][code] = static_cast<std::int8_t>(code);
      made[static_cast<int>(Element::kE4M3)][code] = decoded<epiloq::E4M3>(code);
      made[static_cast<int>(Element::kE5M2)][code] = decoded<epiloq::E5M2>(code);
    }
    return made;
  }();
  return tables[static_cast<int>(element)];
}

// A row of a tile in lines of the 128-byte swizzle, eights of them 1024 bytes apart.
void read_row(Values const& values, Address tile, int row, float (&out)[kDepth]) {
  for (int k = 0; k < kDepth; k += 16) {
    Address const linear = tile + row * 128 + k;
    unsigned char const* const codes = Machine::now().memory(linear ^ (linear >> 7) % 8 * 16, 16);
    for (int i = 0; i < 16; ++i) out[k + i] = values[codes[i]];
  }
}

// Of 32 products float is exact for int8, and no less than the tensor cores are for float8.
void perform(Request const& request, Warp const& warp, unsigned rank) {
  auto const place = [&](std::uint64_t descriptor) { return dsmem_address((descriptor & 0x3fff) << 4, rank); };
  Values const& values = values_of(request.element);
  float row[kDepth], a[kDepth][kRows];
  for (int i = 0; i < kRows; ++i) {
    read_row(values, place(request.a), warp.index % 4 * kRows + i, row);
    for (int k = 0; k < kDepth; ++k) a[k][i] = row[k];
  }
  for (int column = 0; column < request.columns; ++column) {
    float sums[kRows] = {};
    read_row(values, place(request.b), column, row);
    for (int k = 0; k < kDepth; ++k) {
      for (int i = 0; i < kRows; ++i) sums[i] += a[k][i] * row[k];
    }
    for (int i = 0; i < kRows; ++i) {
      auto& lane = *request.sums[i % 8 * 4 + column % 8 / 2];
      std::uint32_t& value = lane.values[column / 8 * 4 + i / 8 * 2 + column % 2];
      std::uint32_t const before = request.add ? value : 0;
      value = request.element == Element::kInt8
                  ? before + static_cast<std::uint32_t>(static_cast<std::int32_t>(sums[i]))
                  : std::bit_cast<std::uint32_t>(std::bit_cast<float>(before) + sums[i]);
    }
  }
}

// The lane's next request. Lanes come one by one, without waiting; what the last asks for is given to the tensor core.
void ask(Request const& wanted, Accumulators* sums) {
  Machine& machine = Machine::now();
  Thread& self = machine.thread();
  Warp& warp = *self.warp;
  std::size_t const index = self.requests++ - warp.given_requests;
  if (index == warp.requests.size()) warp.requests.push_back(wanted);
  Request& request = warp.requests[index];
  auto const key = [](Request const& r) { return std::tuple(r.element, r.a, r.b, r.columns, r.add, r.ends_group); };
  if (key(request) != key(wanted)) machine.fail("asks for another product than other lanes of its warp");
  request.sums[self.lane] = sums;
  if (++request.asked < kWarpLanes) return;
  if (request.ends_group) {
    machine.end_group(Kind::kProduct, warp.products);
  } else {
    machine.issue(
        {Kind::kProduct, [request, &warp, rank = self.block->rank] { perform(request, warp, rank); }, &warp.products});
  }
  warp.requests.pop_front();
  ++warp.given_requests;
}

}  // namespace

void multiply(Element element, std::uint64_t a, std::uint64_t b, void* sums, int columns, bool add) {
  auto& own = Machine::now().thread();
  auto found = std::find_if(own.accumulators.begin(), own.accumulators.end(),
                            [&](Accumulators const& some) { return some.registers == sums; });
  if (found == own.accumulators.end()) {
    auto* const registers = static_cast<std::uint32_t*>(sums);
    found = own.accumulators.insert(found, {sums, {registers, registers + columns / 2}, 0});
    std::fill_n(registers, columns / 2, kPoison);
  }
  found->last_group = own.product_groups;
  ask({element, a, b, columns, add}, &*found);
}

void commit_products() {
  Request end;
  end.ends_group = true;
  ask(end, nullptr);
  ++Machine::now().thread().product_groups;
}

void wait_for_products(int pending) {
  Machine& machine = Machine::now();
  Thread& self = machine.thread();
  machine.may_pause();
  machine.await(self.warp->products, self.product_groups, pending, "wgmma");
  self.accumulators.remove_if([&](Accumulators const& some) {
    bool const is_done = some.last_group < self.product_groups - pending;
    if (is_done) std::memcpy(some.registers, some.values.data(), some.values.size() * sizeof(std::uint32_t));
    return is_done;
  });
}

}  // namespace emulated
