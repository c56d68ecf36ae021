#include "core/host_columns.h"

#include "core/host_rows.h"

namespace epiloq {

void write(Columns const& to, int row, int count, int column, int columns, Line* sums) {
  constexpr int kColumns = sizeof(Line) / sizeof(float);
  float bias[kColumns] = {};
  if (to.bias != nullptr) read_row(to.bias, to.dtype, column, columns, bias);
  for (int m = 0; m < count; ++m) {
    float* const values = sums[m].values;
    for (int i = 0; i < kColumns; ++i) {
      float const value = values[i] + bias[i];
      values[i] = value < to.lo ? to.lo : value > to.hi ? to.hi : value;
    }
    write_row(values, columns, to.dtype, to.out, (row + m) * to.stride + column);
  }
}

}  // namespace epiloq
