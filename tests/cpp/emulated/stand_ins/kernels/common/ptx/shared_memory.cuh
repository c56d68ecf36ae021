#pragma once

#include <cstring>

#include "kernels/common/ptx/cp_async.cuh"

namespace epiloq::gemm {

template <class T>
T load_from(SharedAddress from) {
  T value;
  std::memcpy(&value, emulated::memory_at(from, sizeof value), sizeof value);
  return value;
}
inline float load_shared(SharedAddress from) { return load_from<float>(from); }
inline float2 load_shared_pair(SharedAddress from) { return load_from<float2>(from); }
inline std::uint32_t load_shared_bits(SharedAddress from) { return load_from<std::uint32_t>(from); }
inline void load_shared(std::uint32_t (&bits)[4], SharedAddress from) {
  std::memcpy(bits, emulated::memory_at(from, sizeof bits), sizeof bits);
}
inline void store_shared_pair(SharedAddress to, float2 pair) {
  std::memcpy(emulated::memory_at(to, sizeof pair), &pair, sizeof pair);
}

}  // namespace epiloq::gemm
