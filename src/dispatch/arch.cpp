#include "dispatch/arch.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <string>

#include "epiloq/error.h"
#include "epiloq/kernel_archs.h"
#include "epiloq/tuning.h"

namespace epiloq {
namespace {

struct ArchRow {
  Arch arch;
  char const* name;
  bool is_built;
};
// A new architecture is a row here, one in kFirstCards, and its place in kKernelSets.
constexpr ArchRow kArchs[] = {
    {Arch::kAuto, "auto", false},           {Arch::kSm75, "sm75", EPILOQ_HAS_SM75},
    {Arch::kSm80, "sm80", EPILOQ_HAS_SM80}, {Arch::kSm89, "sm89", EPILOQ_HAS_SM89},
    {Arch::kSm90, "sm90", EPILOQ_HAS_SM90}, {Arch::kSm100, "sm100", false},  // no kernels yet: kernels/sm100
};

// T4, A100, RTX 4090, H100.
constexpr Target kFirstCards[] = {
    {Arch::kSm75, 40, 65536, false, 320},
    {Arch::kSm80, 108, 166912, false, 1555},
    {Arch::kSm89, 128, 101376, false, 1008},
    {Arch::kSm90, 132, 232448, true, 3352},
};

// An operation's SM90 kernels: all WGMMA, which only compute capability 9.0 has, so that newer devices run an older
// architecture's kernels; or partly plain code with clusters, which newer devices run through PTX.
enum class Sm90Kernels { kWgmma, kForward };

constexpr Arch kEvery[] = {Arch::kSm90, Arch::kSm89, Arch::kSm80, Arch::kSm75};
constexpr Arch kInt8[] = {Arch::kSm90, Arch::kSm80, Arch::kSm75};
constexpr Arch kFloat8[] = {Arch::kSm90, Arch::kSm89};
constexpr Arch kFromSm80[] = {Arch::kSm90, Arch::kSm80};

struct KernelSetRow {
  KernelSet set;
  std::span<Arch const> archs;      // newest first
  std::span<Arch const> explained;  // without a device
  Sm90Kernels sm90;
  char const* hint = "";
};
constexpr KernelSetRow kKernelSets[] = {
    {KernelSet::kInt8Gemm, kInt8, kEvery, Sm90Kernels::kWgmma},
    {KernelSet::kFloat8Gemm, kFloat8, kEvery, Sm90Kernels::kWgmma,
     "; float8 needs compute capability 8.9 or newer, int8 (scheme w8a8-int8) runs on 7.5"},
    {KernelSet::kInt8Groupwise, kFromSm80, kFromSm80, Sm90Kernels::kWgmma},
    {KernelSet::kFloat8Groupwise, kFloat8, kFloat8, Sm90Kernels::kWgmma},
    {KernelSet::kWeightOnly, kInt8, kInt8, Sm90Kernels::kForward},
    {KernelSet::kOnlineQuant, kInt8, kInt8, Sm90Kernels::kForward},
    {KernelSet::kConvolution, kInt8, kInt8, Sm90Kernels::kForward},
    {KernelSet::kDecodeAttention, kFromSm80, kFromSm80, Sm90Kernels::kForward},
};

KernelSetRow const& row_of(KernelSet set) {
  return *std::find_if(std::begin(kKernelSets), std::end(kKernelSets),
                       [set](KernelSetRow const& row) { return row.set == set; });
}

ArchRow const* row_of(Arch arch) {
  auto const* const found =
      std::find_if(std::begin(kArchs), std::end(kArchs), [arch](ArchRow const& row) { return row.arch == arch; });
  return found == std::end(kArchs) ? nullptr : found;
}

Target const& first_card(Arch arch) {
  return *std::find_if(std::begin(kFirstCards), std::end(kFirstCards),
                       [arch](Target const& card) { return card.arch == arch; });
}

bool runs(int capability, Arch arch, Sm90Kernels sm90) {
  if (arch == Arch::kSm90 && sm90 == Sm90Kernels::kWgmma) return capability == static_cast<int>(arch);
  return capability >= static_cast<int>(arch);
}

thread_local Arch t_forced_arch = Arch::kAuto;

}  // namespace

std::string name(Arch arch) {
  ArchRow const* const row = row_of(arch);
  return row == nullptr ? "unknown" : row->name;
}

Arch parse_arch(std::string const& text) {
  std::string known;
  for (ArchRow const& row : kArchs) {
    if (text == row.name) return row.arch;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw InvalidArgument("epiloq: arch: expected one of " + known + ", got " + text);
}

std::vector<Arch> built_archs() {
  std::vector<Arch> archs;
  for (ArchRow const& row : kArchs) {
    if (row.is_built) archs.push_back(row.arch);
  }
  return archs;
}

bool is_built(Arch arch) {
  ArchRow const* const row = row_of(arch);
  return row != nullptr && row->is_built;
}

void force_arch(Arch arch) { t_forced_arch = arch; }
Arch forced_arch() { return t_forced_arch; }

bool runs_kernels_of(Arch arch, int device) {
  bool const is_allowed = forced_arch() == Arch::kAuto || forced_arch() == arch;
  int const capability = device_properties(device).compute_capability;
  return is_allowed && is_built(arch) && runs(capability, arch, Sm90Kernels::kWgmma);
}

bool multiplies_float8(Device device) {
  return device.type != Device::Type::kCuda || find_target(KernelSet::kFloat8Gemm, device.index).has_value();
}

std::optional<Target> find_target(KernelSet set, int device) {
  DeviceProperties const& properties = device_properties(device);
  KernelSetRow const& kernels = row_of(set);
  Arch const forced = forced_arch();
  int const capability = properties.compute_capability;
  for (Arch arch : kernels.archs) {
    if (forced != Arch::kAuto && forced != arch) continue;
    if (!is_built(arch) || !runs(capability, arch, kernels.sm90)) continue;
    bool const has_wgmma = arch == Arch::kSm90 && capability == static_cast<int>(arch);
    int const memory_gb_s = properties.memory_gb_s > 0 ? properties.memory_gb_s : first_card(arch).memory_gb_s;
    return Target{arch, properties.sm_count, properties.shared_memory_per_block, has_wgmma, memory_gb_s};
  }
  return std::nullopt;
}

Target target_of_device(char const* operation, KernelSet set, int device) {
  if (auto const target = find_target(set, device)) return *target;
  std::string built;
  for (Arch arch : built_archs()) built += " " + name(arch);
  throw Unsupported("epiloq." + std::string(operation) + ": no kernel for cuda:" + std::to_string(device) +
                    " (compute capability " + std::to_string(device_properties(device).compute_capability) + ", arch " +
                    name(forced_arch()) + "); this build has" + (built.empty() ? " none" : built) + row_of(set).hint);
}

Target nominal(KernelSet set, Arch arch) {
  if (arch == Arch::kSm100) {
    throw Unsupported("epiloq.explain: arch: sm100 has no kernels of its own; its cards run those of sm80 and sm89");
  }
  auto const explained = row_of(set).explained;
  std::string names;
  for (Target const& card : kFirstCards) {
    if (std::find(explained.begin(), explained.end(), card.arch) == explained.end()) continue;
    if (card.arch == arch) return card;
    names += (names.empty() ? "" : ", ") + name(card.arch);
  }
  throw InvalidArgument("epiloq.explain: arch: expected one of " + names + ", got " + name(arch));
}

Target target_of_index(char const* operation, KernelSet set, int device) {
  return device == kNoDevice ? nominal(set, forced_arch()) : target_of_device(operation, set, device);
}

Target target_of(char const* operation, KernelSet set, Device device) {
  return target_of_index(operation, set, device.type == Device::Type::kCuda ? device.index : kNoDevice);
}

}  // namespace epiloq
