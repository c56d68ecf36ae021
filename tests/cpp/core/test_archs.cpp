// Which architecture's kernels a device runs (dispatch/arch.h), by its compute capability, by what is built and by what
// is forced. This executable's devices are made up: the number of each is its compute capability.

#include <array>
#include <optional>
#include <string>

#include "check.h"
#include "dispatch/arch.h"
#include "epiloq/kernel_archs.h"

namespace epiloq {

DeviceProperties const& device_properties(int device) {
  static DeviceProperties properties;
  properties = {device, 100, 1 << 17, 1 << 25, 0};
  return properties;
}

}  // namespace epiloq

using namespace epiloq;

namespace {

constexpr bool kOnlySm90 = !EPILOQ_HAS_SM80;
constexpr std::array kCapabilities{70, 75, 80, 86, 89, 90, 100, 120};
using Numbers = std::array<int, kCapabilities.size()>;  // of the architecture that each runs; 0: none

struct Row {
  KernelSet set;
  Numbers all;        // with every architecture built
  Numbers only_sm90;  // with SM90's kernels alone
};
// WGMMA does not run on newer devices, which fall back on older kernels.
constexpr Row kExpected[] = {
    {KernelSet::kInt8Gemm, {0, 75, 80, 80, 80, 90, 80, 80}, {0, 0, 0, 0, 0, 90, 0, 0}},
    {KernelSet::kFloat8Gemm, {0, 0, 0, 0, 89, 90, 89, 89}, {0, 0, 0, 0, 0, 90, 0, 0}},
    {KernelSet::kInt8Groupwise, {0, 0, 80, 80, 80, 90, 80, 80}, {0, 0, 0, 0, 0, 90, 0, 0}},
    {KernelSet::kFloat8Groupwise, {0, 0, 0, 0, 89, 90, 89, 89}, {0, 0, 0, 0, 0, 90, 0, 0}},
    {KernelSet::kWeightOnly, {0, 75, 80, 80, 80, 90, 90, 90}, {0, 0, 0, 0, 0, 90, 90, 90}},
    {KernelSet::kOnlineQuant, {0, 75, 80, 80, 80, 90, 90, 90}, {0, 0, 0, 0, 0, 90, 90, 90}},
    {KernelSet::kConvolution, {0, 75, 80, 80, 80, 90, 90, 90}, {0, 0, 0, 0, 0, 90, 90, 90}},
    {KernelSet::kDecodeAttention, {0, 0, 80, 80, 80, 90, 90, 90}, {0, 0, 0, 0, 0, 90, 90, 90}},
};

int found(KernelSet set, int capability) {
  std::optional<Target> const target = find_target(set, capability);
  return target ? static_cast<int>(target->arch) : 0;
}

void each_set_runs_the_newest_kernels_that_the_device_has() {
  for (Row const& row : kExpected) {
    for (std::size_t i = 0; i < kCapabilities.size(); ++i) {
      int const capability = kCapabilities[i];
      CHECK_EQUAL(found(row.set, capability), (kOnlySm90 ? row.only_sm90 : row.all)[i]);
      if (std::optional<Target> const target = find_target(row.set, capability)) {
        CHECK_EQUAL(target->has_wgmma, capability == 90);
        CHECK_EQUAL(target->sm_count, 100);
        CHECK(target->memory_gb_s > 0);  // of the first card, as the driver reports none
      } else {
        CHECK_THROWS(Unsupported, target_of_device("op", row.set, capability),
                     "epiloq.op: no kernel for cuda:", "compute capability " + std::to_string(capability));
      }
    }
  }
}

// A forced architecture is the only one, and runs where it would have run.
void forced_architectures() {
  for (Arch arch : {Arch::kSm75, Arch::kSm80, Arch::kSm89, Arch::kSm90, Arch::kSm100}) {
    for (Row const& row : kExpected) {
      for (int capability : kCapabilities) {
        int const best = found(row.set, capability);
        force_arch(arch);
        int const forced = found(row.set, capability);
        CHECK(forced == 0 || forced == static_cast<int>(arch));
        if (best == static_cast<int>(arch)) CHECK_EQUAL(forced, best);
        if (best == 0) CHECK_EQUAL(forced, 0);
        force_arch(Arch::kAuto);
      }
    }
  }
}

void float8_products() {
  for (std::size_t i = 0; i < kCapabilities.size(); ++i) {
    Numbers const& archs = kOnlySm90 ? kExpected[1].only_sm90 : kExpected[1].all;
    CHECK_EQUAL(multiplies_float8({Device::Type::kCuda, kCapabilities[i]}), archs[i] != 0);
  }
  CHECK(multiplies_float8({}));
  force_arch(Arch::kSm80);
  CHECK(!multiplies_float8({Device::Type::kCuda, 90}));
  CHECK(multiplies_float8({}));
  force_arch(Arch::kSm90);
  CHECK(!multiplies_float8({Device::Type::kCuda, 100}));
  CHECK(multiplies_float8({Device::Type::kCuda, 90}));
  force_arch(Arch::kAuto);
}

void kernels_of_an_architecture() {
  CHECK(runs_kernels_of(Arch::kSm90, 90));
  CHECK(!runs_kernels_of(Arch::kSm90, 100));
  CHECK(!runs_kernels_of(Arch::kSm90, 89));
  for (int capability : {89, 90, 120}) CHECK_EQUAL(runs_kernels_of(Arch::kSm89, capability), !kOnlySm90);
  CHECK(!runs_kernels_of(Arch::kSm89, 86));
  CHECK(!runs_kernels_of(Arch::kSm100, 100));  // without kernels of its own
  force_arch(Arch::kSm89);
  CHECK(!runs_kernels_of(Arch::kSm90, 90));
  CHECK_EQUAL(runs_kernels_of(Arch::kSm89, 90), !kOnlySm90);
  force_arch(Arch::kAuto);
}

}  // namespace

int main() {
  each_set_runs_the_newest_kernels_that_the_device_has();
  forced_architectures();
  float8_products();
  kernels_of_an_architecture();
  return test::failures == 0 ? 0 : 1;
}
