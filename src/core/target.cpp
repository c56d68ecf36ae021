#include "core/target.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "epiloq/error.h"

namespace epiloq {
namespace {

// T4, A100, RTX 4090, H100
constexpr Target kFirstCards[] = {
    {Arch::kSm75, 40, 65536, false, 320},
    {Arch::kSm80, 108, 166912, false, 1555},
    {Arch::kSm89, 128, 101376, false, 1008},
    {Arch::kSm90, 132, 232448, true, 3352},
};

Target const& first_card(Arch arch) {
  return *std::find_if(std::begin(kFirstCards), std::end(kFirstCards),
                       [arch](Target const& card) { return card.arch == arch; });
}

}  // namespace

Target nominal(Arch arch, std::initializer_list<Arch> served) {
  std::string names;
  for (Target const& card : kFirstCards) {
    if (std::find(served.begin(), served.end(), card.arch) == served.end()) continue;
    if (card.arch == arch) return card;
    names += (names.empty() ? "" : ", ") + name(card.arch);
  }
  throw InvalidArgument("epiloq.explain: arch: expected one of " + names + ", got " + name(arch));
}

Target target_of_device(char const* operation, int device) {
  DeviceProperties const& properties = device_properties(device);
  Arch const forced = forced_arch();
  for (Arch arch : {Arch::kSm90, Arch::kSm80, Arch::kSm75}) {
    if (forced != Arch::kAuto && forced != arch) continue;
    int const capability = properties.compute_capability;
    if (is_built(arch) && capability >= static_cast<int>(arch)) {
      bool const has_wgmma = arch == Arch::kSm90 && capability == static_cast<int>(arch);
      int const said = properties.memory_gb_s, memory_gb_s = said > 0 ? said : first_card(arch).memory_gb_s;
      return {arch, properties.sm_count, properties.shared_memory_per_block, has_wgmma, memory_gb_s};
    }
  }
  throw Unsupported("epiloq." + std::string(operation) + ": no kernel for cuda:" + std::to_string(device) +
                    " (compute capability " + std::to_string(properties.compute_capability) + ", arch " + name(forced) +
                    ") in this build");
}

}  // namespace epiloq
