#include "cpu/common/columns.h"

#include <algorithm>

#include "cpu/common/outputs.h"
#include "cpu/common/rows.h"
#include "cpu/isa/versions.h"

namespace epiloq {
namespace {

// A part of an output: `columns` columns of `count` rows, beginning at `out`.
struct Part {
  Columns const& to;
  int count, column, columns;
  float const* sums;
  int stride;
  std::int64_t offset;
};

template <DType kType>
struct WriteColumns {
  template <int kLanes>
  struct Kernel {
    static constexpr int kMost = kMostColumns, kColumnsPerStep = kOutputBlock;
    using Floats = typename Vectors<kLanes>::Floats;

    [[gnu::always_inline]] static void run(Part const& part) {
      Columns const to = part.to;  // D is not part of it
      float bias[kMost] = {};
      if (to.bias != nullptr) read_row(to.bias, kType, part.column, part.columns, bias);
      auto* out = static_cast<OutputElement<kType>*>(to.out) + part.offset;
      float const* sums = part.sums;
      for (int m = 0; m < part.count; ++m, sums += part.stride, out += to.stride) {
        if (m + kRowsAhead < part.count) expect_row(out + kRowsAhead * to.stride, part.columns);
        for (int column = 0; column < part.columns; column += kColumnsPerStep) {
          float values[kColumnsPerStep];
          for (int i = 0; i < kColumnsPerStep; i += kLanes) {
            Floats value, of_column;
            load(value, sums + column + i), load(of_column, bias + column + i);
            value += of_column;
            value = value < to.lo ? Floats{} + to.lo : value > to.hi ? Floats{} + to.hi : value;
            std::memcpy(values + i, &value, sizeof(value));
          }
          put<kType, kLanes>(values, part.columns - column, out + column);
        }
      }
    }
  };
};

template <DType kType>
void write_as(Part const& part) {
  static auto const run = Versions<WriteColumns<kType>::template Kernel, Part const&>::here();
  run(part);
}

}  // namespace

void write(Columns const& to, int row, int count, int column, int columns, float const* sums, int stride) {
  Part const part{to, count, column, columns, sums, stride, row * to.stride + column};
  switch (to.dtype) {
    case DType::kFloat16:
      return write_as<DType::kFloat16>(part);
    case DType::kBFloat16:
      return write_as<DType::kBFloat16>(part);
    default:
      return write_as<DType::kFloat32>(part);
  }
}

}  // namespace epiloq
