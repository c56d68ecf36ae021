#include "core/host_columns.h"

#include <algorithm>

#include "core/host_rows.h"

namespace epiloq {

void write(Columns const& to, int row, int count, int column, int columns, float* sums, int stride) {
  constexpr int kMost = 16;
  for (; columns > 0; column += kMost, columns -= kMost, sums += kMost) {
    int const some = std::min(columns, kMost);
    float bias[kMost] = {};
    if (to.bias != nullptr) read_row(to.bias, to.dtype, column, some, bias);
    for (int m = 0; m < count; ++m) {
      float* const values = sums + m * stride;
      for (int i = 0; i < kMost; ++i) {
        float const value = values[i] + bias[i];
        values[i] = value < to.lo ? to.lo : value > to.hi ? to.hi : value;
      }
      write_row(values, some, to.dtype, to.out, (row + m) * to.stride + column);
    }
  }
}

}  // namespace epiloq
