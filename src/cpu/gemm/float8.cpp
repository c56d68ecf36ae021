#include "cpu/gemm/float8.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/common/rows.h"
#include "cpu/gemm/float8_avx512_bf16.h"
#include "cpu/gemm/float8_avx512_columns.h"
#include "cpu/gemm/float8_vectors.h"
#include "cpu/isa/versions.h"
#include "epiloq/batch_invariant.h"

namespace epiloq {
namespace {

std::int64_t rounded_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Line* lines_of(float* sums) { return reinterpret_cast<Line*>(sums); }

// Tokens per pass over the matrix: as many as fit L2, but enough to amortise its conversion.
std::int64_t tokens_at_once(std::int64_t columns, std::int64_t cached, std::int64_t least) {
  return std::max(least, cached / std::max<std::int64_t>(columns, 1) / least * least);
}

template <class Format>
struct Of {
  template <int kLanes>
  struct Widen {
    [[gnu::always_inline]] static void run(ScaledFloat8 const& x, std::int64_t row, float* out) {
      WidenFloat8<Format, kLanes>::row(x, row, out);
    }
  };
  template <int kLanes>
  struct Order {
    [[gnu::always_inline]] static void run(float const* row, std::int64_t columns, float* out) {
      SmallMFloat8<Format, kLanes>::arrange(row, columns, out);
    }
  };
  template <int kLanes>
  using SmallM = SmallMFloat8<Format, kLanes>;
  template <int kLanes>
  using LargeM = LargeMFloat8<Format, kLanes>;
};
using Widen = void (*)(ScaledFloat8 const&, std::int64_t, float*);
using MultiplyFloats = void (*)(ScaledFloat8 const&, std::int64_t, FloatTokens const&, Line*);
template <template <int kLanes> class Kernel>
using Multiplies = Versions<Kernel, ScaledFloat8 const&, std::int64_t, FloatTokens const&, Line*>;
template <class Format>
using Widens = Versions<Of<Format>::template Widen, ScaledFloat8 const&, std::int64_t, float*>;

template <class Format, bool kIsSmallM>
MultiplyFloats multiply_by() {
  return kIsSmallM ? Multiplies<Of<Format>::template SmallM>::here() : Multiplies<Of<Format>::template LargeM>::here();
}

// read(m) for tokens: gives them the type that a kernel multiplies.
auto reader_of(ScaledFloat8 const& x) {
  Widen const widen = x.is_e5m2 ? Widens<E5M2>::here() : Widens<E4M3>::here();
  return [&x, widen](std::int64_t m, float* out) { widen(x, m, out); };
}
auto reader_of(FloatRows const& x) {
  return
      [&x](std::int64_t m, float* out) { read_row(x.values, x.dtype, m * x.stride, static_cast<int>(x.columns), out); };
}

// In vectors of the widest registers: a few tokens by rows in memory order, or many by widened rows.
template <bool kIsSmallM, class Tokens>
void multiply_floats(Tokens const& x, ScaledFloat8 const& w, int threads, FinishPanel<float> const& finish) {
  constexpr int kPanelRows = 16;
  std::int64_t const stride = rounded_up(w.columns, 4 * 16);
  std::vector<float> tokens(rounded_up(x.rows, kTokensUpTo) * stride);
  auto const read = reader_of(x);
  auto const order = Versions<Of<E4M3>::Order, float const*, std::int64_t, float*>::here();
  share(x.rows, threads, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> row(kIsSmallM ? x.columns : 0);
    for (std::int64_t m = first; m < last; ++m) {
      float* const token = tokens.data() + m * stride;
      read(m, kIsSmallM ? row.data() : token);
      if (kIsSmallM) order(row.data(), x.columns, token);
    }
  });
  MultiplyFloats const multiply = w.is_e5m2 ? multiply_by<E5M2, kIsSmallM>() : multiply_by<E4M3, kIsSmallM>();
  by_panels(x.rows, w.rows, kPanelRows, tokens_at_once(w.columns, 1 << 17, 48), threads, finish,
            [&](int row, int first, int count, float* sums) {
              multiply(w, row, {tokens.data() + first * stride, stride, count}, lines_of(sums));
            });
}

#ifdef EPILOQ_HAS_CLONES
// A K block's scales of every token, up to a multiple of kTokensUpTo, then the next K block's.
std::vector<float> scales_of(ScaledFloat8 const& x) {
  std::int64_t const k_blocks = x.scale == nullptr ? 0 : (x.columns + kFloat8Columns - 1) / kFloat8Columns;
  std::int64_t const tokens = rounded_up(x.rows, kTokensUpTo);
  std::vector<float> scales(k_blocks * tokens);
  for (std::int64_t i = 0; i < k_blocks; ++i) {
    for (std::int64_t m = 0; m < x.rows; ++m) scales[i * tokens + m] = x.scale_at(m, i);
  }
  return scales;
}
std::vector<float> scales_of(FloatRows const&) { return {}; }

template <class Tokens>
void multiply_pairs(Tokens const& x, ScaledFloat8 const& w, int threads, FinishPanel<float> const& finish) {
  std::int64_t const stride = RowsByTokens::lines(w.columns);
  std::vector<Line> tokens(rounded_up(x.rows, kTokensUpTo) * stride);
  std::vector<float> const scales = scales_of(x);
  share(x.rows, threads, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t m = first; m < last; ++m) RowsByTokens::arrange(x, m, tokens.data() + m * stride);
  });
  by_panels(x.rows, w.rows, RowsByTokens::kSums, tokens_at_once(w.columns, 1 << 18, 64), threads, finish,
            [&](int row, int first, int count, float* sums) {
              Float8Pairs const some{.x = tokens.data() + first * stride,
                                     .stride = stride,
                                     .scale = scales.empty() ? nullptr : scales.data() + first,
                                     .of_k_block = rounded_up(x.rows, kTokensUpTo),
                                     .count = count};
              RowsByTokens::run(w, row, some, lines_of(sums));
            });
}

template <class Tokens>
void multiply_columns(Tokens const& x, ScaledFloat8 const& w, int threads, FinishPanel<float> const& finish) {
  using Kernel = ColumnsByTokenBlocks;
  std::int64_t const words = Kernel::words(w.columns);
  std::vector<std::uint32_t> tokens(rounded_up(x.rows, kPairBlock) * words);
  std::vector<float> const scales = scales_of(x);
  share(rounded_up(x.rows, kPairBlock) / kPairBlock, threads, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) Kernel::arrange(x, i, tokens.data() + i * kPairBlock * words);
  });
  by_panels(x.rows, w.rows, Kernel::kRows, tokens_at_once(w.columns, 1 << 18, 8 * kPairBlock), threads, finish,
            [&](int row, int first, int count, float* sums) {
              Float8Blocks const some{.x = tokens.data() + first * words,
                                      .words = words,
                                      .scale = scales.empty() ? nullptr : scales.data() + first,
                                      .of_k_block = rounded_up(x.rows, kTokensUpTo),
                                      .count = count};
              Kernel::run(w, row, some, lines_of(sums));
            });
}

template <class Tokens>
void multiply_tiles(Tokens const& x, ScaledFloat8 const& w, int threads, FinishPanel<float> const& finish) {
  TokenTiles const tiles{Float8InTiles::lines(w.columns), static_cast<int>(x.rows)};
  std::vector<Line> lines(tiles.size());
  std::vector<float> const scales = scales_of(x);
  share(tiles.count(), threads, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) Float8InTiles::arrange(x, tiles, static_cast<int>(i), lines.data());
  });
  Float8Tiles const tokens{.x = lines.data(),
                           .tiles = tiles,
                           .scale = scales.empty() ? nullptr : scales.data(),
                           .of_k_block = rounded_up(x.rows, kTokensUpTo)};
  by_panels(x.rows, w.rows, Float8InTiles::kRows, tokens_at_once(w.columns, 1 << 19, 64), threads, finish,
            [&](int row, int first, int count, float* sums) {
              int const tile = first / TokenTiles::kTokens;
              Float8InTiles::run(w, row, tokens, tile, count, lines_of(sums));
            });
}
#endif

constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max(), kFewestForColumns = 5, kMostInRegisters = 8;
constexpr std::int64_t kFewestForTiles = 2;
constexpr char const* kTiles = "float8 as pairs of bfloat16, AMX";
constexpr char const* kColumns = "16 rows of float8 at a time as pairs of bfloat16, AVX-512 BF16 and VBMI";
constexpr char const* kPairs = "float8 as pairs of bfloat16, AVX-512 BF16 and VBMI";
constexpr char const* kRegisters = "float8 widened in registers";
constexpr char const* kWidened = "16 rows of float8 widened at a time";

bool has_lookups_and_tiles() { return has_lookups() && has_pair_tiles(); }

constexpr Float8Routine kRoutines[] = {
#ifdef EPILOQ_HAS_CLONES
    // (One token is as fast without AMX, and its scales are applied faster.)
    {kTiles, has_lookups_and_tiles, kFewestForTiles, kAny, multiply_tiles},
    // (Slower for three and four tokens, except in groups of 128.)
    {kColumns, has_lookups, kFewestForColumns, kAny, multiply_columns},
    {kPairs, has_lookups, 0, kAny, multiply_pairs},
#endif
    {kRegisters, [] { return true; }, 0, kMostInRegisters, multiply_floats<true>},
    {kWidened, [] { return true; }, 0, kAny, multiply_floats<false>},
};

using MultiplyByFloats = void (*)(FloatRows const&, ScaledFloat8 const&, int, FinishPanel<float> const&);
struct FloatsRoutine {
  char const* name;
  bool (*is_for)(DType);
  std::int64_t fewest, most;
  MultiplyByFloats multiply;
};
bool is_for_pairs(DType dtype) { return dtype == DType::kBFloat16 && has_lookups(); }
bool is_for_any(DType) { return true; }
constexpr FloatsRoutine kOfFloats[] = {
#ifdef EPILOQ_HAS_CLONES
    {kTiles, [](DType dtype) { return dtype == DType::kBFloat16 && has_lookups_and_tiles(); }, kFewestForTiles, kAny,
     multiply_tiles},
    {kColumns, is_for_pairs, kFewestForColumns, kAny, multiply_columns},
    {kPairs, is_for_pairs, 0, kAny, multiply_pairs},
#endif
    {kRegisters, is_for_any, 0, kMostInRegisters, multiply_floats<true>},
    {kWidened, is_for_any, 0, kAny, multiply_floats<false>},
};

FloatsRoutine const& routine_of_floats(std::int64_t rows, DType dtype) {
  std::int64_t const tokens = batch_invariant() ? kAny : rows;
  return *std::ranges::find_if(kOfFloats, [=](FloatsRoutine const& routine) {
    return routine.fewest <= tokens && tokens <= routine.most && routine.is_for(dtype);
  });
}

}  // namespace

std::span<Float8Routine const> float8_routines() { return kRoutines; }

Float8Routine const& float8_routine(std::int64_t rows) {
  std::int64_t const tokens = batch_invariant() ? kAny : rows;
  return *std::ranges::find_if(kRoutines, [tokens](Float8Routine const& routine) {
    return routine.fewest <= tokens && tokens <= routine.most && routine.is_here();
  });
}

void multiply_float8(ScaledFloat8 const& x, ScaledFloat8 const& w, int threads, FinishPanel<float> const& finish) {
  threads = threads_for_products(x.rows * w.rows * w.columns, threads);
  float8_routine(x.rows).multiply(x, w, threads, finish);
}

void multiply_float8(FloatRows const& x, ScaledFloat8 const& w, int threads, FinishPanel<float> const& finish) {
  threads = threads_for_products(x.rows * w.rows * w.columns, threads);
  routine_of_floats(x.rows, x.dtype).multiply(x, w, threads, finish);
}

char const* float8_routine_of_floats(std::int64_t tokens, DType dtype) { return routine_of_floats(tokens, dtype).name; }

}  // namespace epiloq
