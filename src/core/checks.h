#pragma once

#include <sstream>

#include "core/ceil_div.h"
#include "epiloq/error.h"
#include "epiloq/tensor.h"

namespace epiloq {

// [.., R, C] seen as R' rows of C elements, rows `stride` elements apart.
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;
};

// [.., R, C] scales seen as rows x cols of them, either dense along the rows or along the columns.
struct ScaleGrid {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 0;
};

// The checks of one operation; each names the argument, what was expected and what came.
class Checker {
 public:
  Checker(char const* operation, Device device) : operation_(operation), device_(device) {}

  template <class... Parts>
  [[noreturn]] void fail(char const* argument, Parts const&... expected_and_got) const {
    std::ostringstream message;
    message << "epiloq." << operation_ << ": " << argument << ": ";
    (message << ... << expected_and_got);
    throw InvalidArgument(message.str());
  }

  // Right dtype, the operation's device, at most kMaxRank dimensions, no misaligned pointer.
  void tensor(char const* argument, TensorView const& view, std::initializer_list<DType> dtypes) const;
  // Large operands are read 16 bytes at a time.
  void aligned16(char const* argument, TensorView const& view) const;
  // Rows must be dense and the leading dimensions must collapse into one.
  Matrix rows(char const* argument, TensorView const& view) const;
  // One value, or one for each of `count` `things` (rows, columns).
  void scalar_or_vector(char const* argument, TensorView const& view, std::int64_t count, char const* thing) const;
  void vector(char const* argument, TensorView const& view, std::int64_t count) const;
  // rows x cols elements, the last dimension cols, in rows that are dense or in columns that are.
  ScaleGrid scale_grid(char const* argument, TensorView const& view, std::int64_t rows, std::int64_t cols) const;
  void apart(char const* argument, TensorView const& out, char const* other_argument, TensorView const& other) const;

 private:
  char const* operation_;
  Device device_;
};

}  // namespace epiloq
