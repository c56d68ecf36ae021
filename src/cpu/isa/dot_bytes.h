#pragma once

// Products of bytes on the CPU: four unsigned ones of each of kLanes rows by four signed ones that all rows share,
// added to 32 bits. An instruction where there is VNNI; elsewhere bytes 0 and 2, then 1 and 3, as pairs of 16 bits.

#include <cstdint>
#ifdef __x86_64__
#include <immintrin.h>  // intrinsics used by the kernels below
#endif

#include "cpu/common/rows.h"
#include "cpu/isa/vectors.h"

namespace epiloq {

// The shared bytes in the kernels' order: a word of four, or two words of pairs; padded with zeros.
template <int kWords>
inline void in_words(std::int8_t const* from, std::int64_t count, std::int32_t* to) {
  auto const four = [&](std::int8_t const* bytes) {
    if constexpr (kWords == 1) {
      std::memcpy(to, bytes, sizeof(*to));
    } else {
      std::int16_t const pairs[] = {bytes[0], bytes[2], bytes[1], bytes[3]};
      std::memcpy(to, pairs, sizeof(pairs));
    }
    to += kWords;
  };
  for (; count >= 4; count -= 4, from += 4) four(from);
  if (count == 0) return;
  std::int8_t last[4] = {};
  std::memcpy(last, from, count);
  four(last);
}

template <int kLanes>
struct BytePairs {
  using Ints = typename Vectors<kLanes>::Ints;
  Ints even, odd;  // 16 bits each

  [[gnu::always_inline]] void load(std::int32_t const* words) {
    Ints bytes;
    epiloq::load(bytes, words);
    even = bytes & 0x00ff00ff, odd = (bytes >> 8) & 0x00ff00ff;
  }
};

struct PlainBytes {
  static constexpr int kLanes = 4, kWords = 2, kRows = 16, kTokens = 2;
  static constexpr char const* kName = "the baseline's instructions";
  using Ints = Vectors<kLanes>::Ints;
  using Shorts = Vectors<2 * kLanes>::Shorts;

  struct Rows : BytePairs<kLanes> {
    // (A product of two bytes fits 16 bits, the sum of two such does not.)
    [[gnu::always_inline]] static void add(Ints& sum, Ints const& bytes, std::int32_t x) {
      Ints const products = (Ints)((Shorts)bytes * (Shorts)(x - Ints{}));
      sum += (products << 16 >> 16) + (products >> 16);
    }
    [[gnu::always_inline]] void add(Ints& sum, std::int32_t const* x) const {
      add(sum, this->even, x[0]), add(sum, this->odd, x[1]);
    }
  };
};

#ifdef EPILOQ_HAS_CLONES
// (gcc's warning about the ABI of functions that return vectors does not apply to intrinsics.)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"
struct PairedBytes {
  static constexpr int kLanes = 8, kWords = 2, kRows = 16, kTokens = 4;
  static constexpr char const* kName = "AVX2";
  using Ints = Vectors<kLanes>::Ints;
  using Shorts = Vectors<2 * kLanes>::Shorts;

  struct Rows : BytePairs<kLanes> {
    [[gnu::always_inline]] void add(Ints& sum, std::int32_t const* x) const {
      sum += (Ints)__builtin_ia32_pmaddwd256((Shorts)this->even, (Shorts)(x[0] - Ints{}));
      sum += (Ints)__builtin_ia32_pmaddwd256((Shorts)this->odd, (Shorts)(x[1] - Ints{}));
    }
  };
};

struct VnniBytes {
  static constexpr int kLanes = 16, kWords = 1, kRows = 32, kTokens = 8;
  static constexpr char const* kName = "AVX-512 VNNI";
  using Ints = Vectors<kLanes>::Ints;

  [[gnu::always_inline]] static void add(Ints& sum, Ints const& bytes, Ints const& x) {
    sum = (Ints)__builtin_ia32_vpdpbusd_v16si(sum, bytes, x);
  }

  struct Rows {
    Ints bytes;
    [[gnu::always_inline]] void load(std::int32_t const* words) { epiloq::load(bytes, words); }
    [[gnu::always_inline]] void add(Ints& sum, std::int32_t const* x) const { VnniBytes::add(sum, bytes, *x - Ints{}); }
  };
};
#pragma GCC diagnostic pop
#endif

// Calls call(bytes) for this machine's instruction set.
template <class Call>
auto with_bytes(Call const& call) {
#ifdef EPILOQ_HAS_CLONES
  if (__builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vnni")) return call(VnniBytes{});
  if (__builtin_cpu_supports("x86-64-v3")) return call(PairedBytes{});
#endif
  return call(PlainBytes{});
}

// The same as numbers.
struct BytesHere {
  char const* name;
  int words, rows;
  void (*in_words)(std::int8_t const* from, std::int64_t count, std::int32_t* to);
};
inline BytesHere const& bytes_here() {
  static BytesHere const here = with_bytes(
      [](auto bytes) { return BytesHere{bytes.kName, bytes.kWords, bytes.kRows, &in_words<decltype(bytes)::kWords>}; });
  return here;
}

// Kernel<Bytes>::run, compiled for the instruction set of Bytes.
template <template <class Bytes> class Kernel, class... Arguments>
struct ByteVersions {
  using Function = void (*)(Arguments...);

  static void plain(Arguments... arguments) { Kernel<PlainBytes>::run(arguments...); }
  static Function of(PlainBytes) { return plain; }
#ifdef EPILOQ_HAS_CLONES
  [[gnu::target("arch=x86-64-v3")]] static void paired(Arguments... arguments) {
    Kernel<PairedBytes>::run(arguments...);
  }
  [[gnu::target("arch=x86-64-v4,avx512vnni")]] static void vnni(Arguments... arguments) {
    Kernel<VnniBytes>::run(arguments...);
  }
  static Function of(PairedBytes) { return paired; }
  static Function of(VnniBytes) { return vnni; }
#endif

  static Function here() {
    return with_bytes([](auto bytes) { return of(bytes); });
  }
};

}  // namespace epiloq
