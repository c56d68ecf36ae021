#include "epiloq/lookup_int8.h"

#include <algorithm>
#include <array>

#include "core/checks.h"
#include "cpu/quantize/lookup_int8.h"

namespace epiloq {

void lookup_int8(LookupInt8 const& call) {
  Checker const check("lookup_int8", Device{});
  check.tensor("x", call.x, {DType::kInt8});
  check.tensor("table", call.table, {DType::kInt8});
  check.tensor("out", call.out, {DType::kInt8});
  check.vector("table", call.table, 256);
  Matrix const x = check.rows("x", call.x), out = check.rows("out", call.out);
  if (call.x.rank != call.out.rank ||
      !std::equal(call.x.shape.begin(), call.x.shape.begin() + call.x.rank, call.out.shape.begin()))
    check.fail("out", "expected the shape of x, got ", describe(call.out), " for ", describe(call.x));
  check.apart("out", call.out, "x", call.x);
  check.apart("out", call.out, "table", call.table);
  std::array<std::int8_t, 256> table;
  std::copy_n(call.table.as<std::int8_t>(), 256, table.begin());
  std::rotate(table.begin(), table.begin() + 128, table.end());
  bool const dense = x.stride == x.cols && out.stride == out.cols;
  std::int64_t const rows = dense ? 1 : x.rows, count = dense ? x.rows * x.cols : x.cols;
  for (std::int64_t row = 0; row < rows; ++row) {
    ops::lookup_int8::lookup(call.x.as<std::int8_t>() + row * x.stride, count, table.data(),
                             static_cast<std::int8_t*>(call.out.data) + row * out.stride);
  }
}

}  // namespace epiloq
