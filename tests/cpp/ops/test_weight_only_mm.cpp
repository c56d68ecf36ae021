// Weight-only products without a GPU: the order of a packed weight, what the CPU restores from it, the argument checks.

#include <set>
#include <vector>

#include "check.h"
#include "dispatch/weight_only_mm/tables.h"
#include "epiloq/error.h"
#include "epiloq/weight_only_mm.h"
#include "packed_values.h"
#include "problems/packed_layout.h"

using namespace epiloq;
namespace wo = ops::weight_only_mm;

namespace {

constexpr int kBits[] = {2, 3, 4, 8};

// Every row and column of a tile has one place, and every value of the grid survives there.
void each_value_has_its_place(int bits) {
  std::set<std::pair<int, int>> places;
  std::vector<std::uint8_t> lane(wo::lane_bytes(bits));
  for (int l = 0; l < wo::kLanes; ++l) {
    for (int i = 0; i < wo::lane_values(bits); ++i) {
      wo::TileCoord const coord = wo::tile_coord_of(bits, l, i);
      CHECK(coord.row >= 0 && coord.row < wo::kPanelRows && coord.column >= 0 && coord.column < wo::depth(bits));
      places.insert({coord.row, coord.column});
    }
  }
  CHECK_EQUAL(static_cast<int>(places.size()), wo::kPanelRows * wo::depth(bits));
}

// Lane l's register of a fragment of mma.sync m16n8k16 holds rows g and g + 8 in turn, the first half of K before the
// second, two neighbours of each 8 columns.
void check_fragment(int bits, int lane, int step, int reg, int half, int value) {
  wo::TileCoord const coord = wo::tile_coord_of(bits, lane, value);
  CHECK_EQUAL(coord.row, lane / 4 + 8 * (reg % 2));
  CHECK_EQUAL(coord.column, 16 * step + 8 * (reg / 2) + 2 * (lane % 4) + half);
}

// (word >> 4 reg) & 0x000f000f is register `reg`: nibbles `reg` and `reg + 4`.
void nibbles_are_fragments() {
  for (int lane = 0; lane < wo::kLanes; ++lane) {
    for (int step = 0; step < 4; ++step) {
      for (int reg = 0; reg < 4; ++reg) {
        for (int half = 0; half < 2; ++half) {
          int const nibble = reg + 4 * half;
          check_fragment(4, lane, step, reg, half, 8 * step + nibble);
        }
      }
    }
  }
}

// Bytes 0 and 1 of word 2 step + i are register 2 i, bytes 2 and 3 register 2 i + 1.
void bytes_are_fragments() {
  for (int lane = 0; lane < wo::kLanes; ++lane) {
    for (int step = 0; step < 2; ++step) {
      for (int reg = 0; reg < 4; ++reg) {
        for (int half = 0; half < 2; ++half) check_fragment(8, lane, step, reg, half, 8 * step + 2 * reg + half);
      }
    }
  }
}

struct Operands {
  static constexpr int kN = 20, kK = 104, kGroup = 32, kGroups = 4, kPanels = 2;
  int bits;
  std::vector<std::uint8_t> q, zero = std::vector<std::uint8_t>(kPanels * kGroups * wo::kPanelRows, 1);
  std::vector<float> scale = std::vector<float>(kPanels * kGroups * wo::kPanelRows, 0.5F);
  std::vector<float> x = std::vector<float>(3 * kK), out = std::vector<float>(3 * kN),
                     dense = std::vector<float>(kN * kK);
  PackedWeight weight;

  explicit Operands(int bits_) : bits(bits_) {
    std::int64_t const tiles = wo::kPadding / wo::depth(bits), bytes = wo::lane_bytes(bits);
    q.resize(kPanels * tiles * wo::kLanes * bytes);
    weight.q = {q.data(), DType::kUInt8, {}, {kPanels, tiles, wo::kLanes, bytes}};
    weight.scale = {scale.data(), DType::kFloat32, {}, {kPanels, kGroups, wo::kPanelRows}};
    weight.zero = TensorView(zero.data(), DType::kUInt8, {}, {kPanels, kGroups, wo::kPanelRows});
    weight.bits = bits;
    weight.n = kN;
    weight.k = kK;
    weight.group_size = kGroup;
  }
  WeightOnlyMm call() {
    return {.out = {out.data(), DType::kFloat32, {}, {3, kN}},
            .x = {x.data(), DType::kFloat32, {}, {3, kK}},
            .weight = weight};
  }
  DequantizeWeight restore() { return {.out = {dense.data(), DType::kFloat32, {}, {kN, kK}}, .weight = weight}; }
};

void the_cpu_restores_what_lies_there(int bits) {
  auto random = test::generator();
  Operands operands(bits);
  for (auto& byte : operands.q) byte = static_cast<std::uint8_t>(random());
  dequantize_weight(operands.restore(), nullptr);
  std::uint8_t const* lane = operands.q.data();
  for (int panel = 0; panel < Operands::kPanels; ++panel) {
    for (int first = 0; first < wo::kPadding; first += wo::depth(bits)) {
      for (int l = 0; l < wo::kLanes; ++l, lane += wo::lane_bytes(bits)) {
        for (int i = 0; i < wo::lane_values(bits); ++i) {
          wo::TileCoord const coord = wo::tile_coord_of(bits, l, i);
          int const n = panel * wo::kPanelRows + coord.row, k = first + coord.column;
          if (n >= Operands::kN || k >= Operands::kK) continue;
          CHECK_EQUAL(operands.dense[n * Operands::kK + k], 0.5F * static_cast<float>(wo::value_at(lane, bits, i) - 1));
        }
      }
    }
  }
}

template <class Change>
void refused(int line, Change change, std::initializer_list<std::string> parts) {
  Operands operands(4);
  WeightOnlyMm call = operands.call();
  change(call);
  test::throws<InvalidArgument>(__FILE__, line, [&] { check(call); }, parts);
}

void misfits_are_named() {
  Operands operands(4);
  operands.zero[Operands::kGroups * wo::kPanelRows + wo::parameter_of(15)] = 255;  // of a row past N
  check(operands.call());
  check(operands.restore());
  refused(__LINE__, [](auto& c) { c.weight.bits = 5; }, {"epiloq.weight_only_mm: bits: expected 2, 3, 4 or 8, got 5"});
  refused(__LINE__, [](auto& c) { c.weight.group_size = 0; }, {"group_size: expected -1 or at least 1"});
  refused(__LINE__, [](auto& c) { c.weight.n = 40; }, {"weight.q: expected [3, 2, 32, 16]"});
  refused(__LINE__, [](auto& c) { c.weight.group_size = 64; }, {"weight.scale: expected [2, 2, 16]"});
  refused(__LINE__, [](auto& c) { c.weight.zero->dtype = DType::kInt8; }, {"weight.zero: expected uint8"});
  refused(__LINE__, [](auto& c) { c.weight.offset = c.weight.scale; }, {"offset: expected none with zero"});
  refused(__LINE__, [](auto& c) { c.weight.zero->template as<std::uint8_t>()[wo::parameter_of(15)] = 17; },
          {"weight.zero: expected 0 to 16 with 4 bits, got 17"});
  refused(__LINE__, [](auto& c) { c.x.shape[1] = 103; }, {"x: expected 104 columns"});
  refused(__LINE__, [](auto& c) { c.out.dtype = DType::kFloat16; }, {"out: expected float32"});
  refused(__LINE__, [](auto& c) { c.lo = 1, c.hi = 0; }, {"clamp: expected lo <= hi"});
}

void kernels_that_cannot_serve_are_refused() {
  Operands operands(4);
  force_arch(Arch::kSm90);
  WeightOnlyMm call = operands.call();
  call.x.dtype = call.out.dtype = DType::kFloat16;
  CHECK(explain(call).find("gemv") == 0 || explain(call).find("decode") == 0);
  using enum WeightOnlyMmFamily;
  int const past_gemv = static_cast<int>(wo::kGemvRows.size());
  for (WeightOnlyMmKernel const& kernel : {WeightOnlyMmKernel{kGemv, past_gemv, 1},
                                           {kTiled, -1, 1},
                                           {kTiled, 0, 9},
                                           {kGemv, 0, 2},
                                           {kDecode, 7, 1},
                                           {kDense, 0, 1}}) {
    call.kernel = kernel;
    CHECK_THROWS(InvalidArgument, explain(call), "kernel: expected one that fits");
  }
  call.kernel = {kWgmma, 6, 1};
  CHECK_EQUAL(explain(call), "wgmma 128 weight rows x 64 tokens, 4 warpgroups, 2 along K");
  call.weight.offset = call.weight.scale;
  call.weight.zero.reset();
  CHECK_THROWS(InvalidArgument, explain(call), "for offsets or for 2 and 3 bits");
  call.weight.offset.reset();
  force_arch(Arch::kSm80);
  CHECK_THROWS(InvalidArgument, explain(call), "not built for this architecture");
  force_arch(Arch::kAuto);
}

// The cost model divides by numbers of CTAs, of which such problems have none.
void empty_problems_have_no_kernel() {
  WeightOnlyMmProblem problem{16, 4096, 4096, 4, 128, DType::kBFloat16};
  CHECK(explain_weight_only_mm(problem, Arch::kSm90, 0, 0).find("nothing to launch") == std::string::npos);
  problem.m = 0;
  CHECK_EQUAL(explain_weight_only_mm(problem, Arch::kSm90, 0, 0), "nothing to launch: the output is empty");
  problem.m = 16, problem.n = 0;
  CHECK_EQUAL(explain_weight_only_mm(problem, Arch::kSm90, 0, 0, true), "nothing to launch: the output is empty");
  problem.n = -1;
  CHECK_THROWS(InvalidArgument, explain_weight_only_mm(problem, Arch::kSm90, 0, 0), "expected sizes of at least 0");
}

}  // namespace

int main() {
  for (int bits : kBits) {
    each_value_has_its_place(bits);
    the_cpu_restores_what_lies_there(bits);
  }
  nibbles_are_fragments();
  bytes_are_fragments();
  misfits_are_named();
  kernels_that_cannot_serve_are_refused();
  empty_problems_have_no_kernel();
  return test::failures != 0;
}
