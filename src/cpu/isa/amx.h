#pragma once

// AMX: eight tiles of 16 rows of 64 bytes per core; the process must request them from the kernel.

#include "cpu/common/rows.h"

namespace epiloq {

inline constexpr int kTileRows = 16, kTileBytes = 64;

}  // namespace epiloq

#ifdef EPILOQ_HAS_CLONES

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace epiloq {

// Whether the CPU multiplies this kind of tiles and the kernel grants them to this process.
enum class TileKind : unsigned { kBFloat16 = 1U << 22, kInt8 = 1U << 25 };  // CPUID 7, EDX
inline bool has_tiles(TileKind kind) {
  static unsigned const features = [] {
    constexpr unsigned kTile = 1U << 24;
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, which older headers do not have
    unsigned a = 0, b = 0, c = 0, d = 0;
    bool const of_cpu = __builtin_cpu_supports("x86-64-v4") && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 &&
                        (d & kTile) != 0 && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return of_cpu ? d : 0U;
  }();
  return (features & static_cast<unsigned>(kind)) != 0;
}

// The intrinsics do not tell the compiler that they read and write memory.
[[gnu::always_inline]] inline void tile_fence() { asm volatile("" ::: "memory"); }

// Configures a thread's tiles for the lifetime of this object: 0 to 3 accumulators, 4 and 5 rows of so many bytes, 6
// and 7 words of as many columns.
class Tiles {
 public:
  [[gnu::target("amx-tile")]] explicit Tiles(int bytes = kTileBytes) {
    struct alignas(64) {
      std::uint8_t palette = 1, start = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } configuration;
    for (int tile = 0; tile < 8; ++tile) {
      bool const is_first = tile == 4 || tile == 5, is_second = tile > 5;
      configuration.row_bytes[tile] = static_cast<std::uint16_t>(is_first ? bytes : kTileBytes);
      configuration.rows[tile] = static_cast<std::uint8_t>(is_second ? bytes / 4 : kTileRows);
    }
    tile_fence();
    _tile_loadconfig(&configuration);
  }
  [[gnu::target("amx-tile")]] ~Tiles() { _tile_release(); }
  Tiles(Tiles const&) = delete;
  Tiles& operator=(Tiles const&) = delete;
};

}  // namespace epiloq

#endif
