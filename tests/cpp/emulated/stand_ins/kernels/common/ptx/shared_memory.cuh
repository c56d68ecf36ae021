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
inline float4 load_shared_four(SharedAddress from) { return load_from<float4>(from); }
inline std::uint32_t load_shared_bits(SharedAddress from) { return load_from<std::uint32_t>(from); }
inline void load_shared(std::uint32_t (&bits)[4], SharedAddress from) {
  std::memcpy(bits, emulated::memory_at(from, sizeof bits), sizeof bits);
}
inline void store_shared_pair(SharedAddress to, float2 pair) {
  std::memcpy(emulated::memory_at(to, sizeof pair), &pair, sizeof pair);
}

// Lane 8 i + j has the address for column j of matrix i; lane 4 r + c holds columns 2 c and 2 c + 1 of row r.
inline void stmatrix_x4_trans(SharedAddress to, unsigned const (&matrices)[4]) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = 0; i < 8; ++i) {
    SharedAddress const column = emulated::shuffle(to, i / 2 * 8 + lane % 4 * 2 + i % 2);
    auto const number = static_cast<std::uint16_t>(matrices[i / 2] >> (16 * (i % 2)));
    std::memcpy(emulated::memory_at(column + lane / 4 * 2, sizeof number), &number, sizeof number);
  }
}

}  // namespace epiloq::gemm
