#pragma once

#include <cstdint>
#include <memory>

namespace epiloq::gemm {

// A kernel's parameters hold TMA descriptors, which take the driver longer to make than a launch takes. A model comes
// back with the same tensors, so each thread keeps a few, by everything that they are made from.
template <class Problem, class Params>
class ParamsCache {
 public:
  // The address `key` spreads problems over the slots; `make` fills parameters that are not there.
  template <class Make>
  Params& get(std::uintptr_t key, Problem const& problem, int device, Make make) {
    Slot& slot = slots_[(key * 0x9E3779B97F4A7C15u) >> (64 - kBits)];
    if (slot.device != device || !(slot.problem == problem)) {
      slot.device = -1;
      slot.params = make();
      slot.problem = problem;
      slot.device = device;
    }
    return slot.params;
  }

 private:
  static constexpr int kBits = 6;
  struct Slot {
    Problem problem{};
    int device = -1;
    Params params;
  };
  std::unique_ptr<Slot[]> slots_ = std::make_unique<Slot[]>(1 << kBits);
};

// The address by which calls with these operands are remembered.
inline std::uintptr_t cache_key(void const* a, void const* b, void const* d) {
  auto const bits = [](void const* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); };
  return bits(b) ^ (bits(d) << 1) ^ (bits(a) << 2);
}

}  // namespace epiloq::gemm
