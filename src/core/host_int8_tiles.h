#pragma once

// A slab of an int8 weight by many tokens with AMX: tiles of 16 tokens by 64 columns, and of 16 weight rows by as many,
// whose words of four columns lie as `order8` has them.

#include "core/host_int8_slab.h"

#ifdef EPILOQ_HAS_CLONES

#include <asm/prctl.h>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace epiloq {

// A tile has 16 rows of 64 bytes.
inline constexpr int kTileRows = 16, kTileBytes = 64;

// Whether the CPU has tiles, and the system lets this process use them, for which it has to be asked.
inline bool has_tiles() {
  static bool const has = [] {
    constexpr unsigned kTile = 1U << 24, kInt8 = 1U << 25;  // CPUID 7, EDX
    constexpr long kRequest = 0x1023, kTileData = 18;       // ARCH_REQ_XCOMP_PERM, which older headers do not have
    unsigned a = 0, b = 0, c = 0, d = 0;
    bool const of_cpu = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kTile) != 0 && (d & kInt8) != 0;
    return of_cpu && with_bytes([](auto bytes) { return std::is_same_v<decltype(bytes), VnniBytes>; }) &&
           syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return has;
}

struct MultiplyInt8InTiles {
  using One = MultiplyInt8<VnniBytes>;
  using Slab = One::Slab;
  static constexpr int kPiece = 1024;  // columns that are brought into order at a time

  struct alignas(64) Configuration {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
  };

  // As MultiplyInt8, of tokens whose rows are zeros from k up to a multiple of kTileBytes.
  [[gnu::target("arch=x86-64-v4,avx512vnni,amx-tile,amx-int8")]] static void run(Int8SlabByTokens const& s,
                                                                                 std::int32_t* sums) {
    Configuration configuration;
    for (int tile = 0; tile < 8; ++tile) {
      configuration.row_bytes[tile] = kTileBytes, configuration.rows[tile] = kTileRows;
    }
    _tile_loadconfig(&configuration);
    Slab::Rows const rows(s.weight, s.stride, s.rows);
    Slab::Column words[kPiece / 4];
    for (std::int64_t first = 0; first < s.k; first += kPiece) {
      std::int64_t const columns = std::min<std::int64_t>(kPiece, s.k - first);
      Slab::order8(rows, first, columns, s.k, words);
      std::int32_t const* const x = s.x + first / 4;
      int const steps = static_cast<int>((columns + kTileBytes - 1) / kTileBytes);
      int m = 0;
      for (; m + 2 * kTileRows <= s.m; m += 2 * kTileRows) {
        add_two(words, steps, x + m * s.stride_x, s.stride_x, sums + m * Slab::kRows);
      }
      for (; m + kTileRows <= s.m; m += kTileRows) {
        add_one(words, steps, x + m * s.stride_x, s.stride_x, sums + m * Slab::kRows);
      }
      Slab::by_tokens(s.m - m, [&]<int kCount>(int i) __attribute__((always_inline)) {
        One::add<kCount>(words, (columns + 3) / 4, x + (m + i) * s.stride_x, s.stride_x, sums + (m + i) * Slab::kRows);
      });
    }
    _tile_release();
  }

 private:
  static constexpr int kSumBytes = Slab::kRows * 4, kWordBytes = sizeof(Slab::Column);

  // What the instructions' own functions do not tell the compiler: that they read and write memory.
  [[gnu::always_inline]] static void fence() { asm volatile("" ::: "memory"); }

  // 32 tokens, of which four products at a time share each tile that is read.
  [[gnu::target("arch=x86-64-v4,avx512vnni,amx-tile,amx-int8")]] static void add_two(Slab::Column const* words,
                                                                                     int steps, std::int32_t const* x,
                                                                                     std::int64_t stride,
                                                                                     std::int32_t* sums) {
    std::int64_t const x_bytes = stride * 4;
    std::int32_t* const below = sums + kTileRows * Slab::kRows;
    fence();
    _tile_loadd(0, sums, kSumBytes);
    _tile_loadd(1, sums + kTileRows, kSumBytes);
    _tile_loadd(2, below, kSumBytes);
    _tile_loadd(3, below + kTileRows, kSumBytes);
    for (int i = 0; i < steps; ++i) {
      std::int32_t const* const column = x + i * (kTileBytes / 4);
      Slab::Column const* const word = words + i * (kTileBytes / 4);
      _tile_loadd(4, column, x_bytes);
      _tile_loadd(6, word->values, kWordBytes);
      _tile_loadd(7, word->values + kTileRows, kWordBytes);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_loadd(5, column + kTileRows * stride, x_bytes);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums, kSumBytes);
    _tile_stored(1, sums + kTileRows, kSumBytes);
    _tile_stored(2, below, kSumBytes);
    _tile_stored(3, below + kTileRows, kSumBytes);
    fence();
  }

  [[gnu::target("arch=x86-64-v4,avx512vnni,amx-tile,amx-int8")]] static void add_one(Slab::Column const* words,
                                                                                     int steps, std::int32_t const* x,
                                                                                     std::int64_t stride,
                                                                                     std::int32_t* sums) {
    fence();
    _tile_loadd(0, sums, kSumBytes);
    _tile_loadd(1, sums + kTileRows, kSumBytes);
    for (int i = 0; i < steps; ++i) {
      Slab::Column const* const word = words + i * (kTileBytes / 4);
      _tile_loadd(4, x + i * (kTileBytes / 4), stride * 4);
      _tile_loadd(6, word->values, kWordBytes);
      _tile_loadd(7, word->values + kTileRows, kWordBytes);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
    }
    _tile_stored(0, sums, kSumBytes);
    _tile_stored(1, sums + kTileRows, kSumBytes);
    fence();
  }
};

}  // namespace epiloq

#endif
