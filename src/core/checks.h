#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <sstream>

#include "core/ceil_div.h"
#include "epiloq/error.h"
#include "epiloq/tensor.h"

namespace epiloq {

// […, R, C] as R' rows of C elements, `stride` elements apart.
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;
};

struct ProductRows {
  Matrix x, out;
};

// […, R, C] scales as rows x cols, dense along either.
struct ScaleGrid {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 0;
};

// The floating-point types of activations, outputs and scales.
inline constexpr std::initializer_list<DType> kFloats = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

inline bool is_aligned(void const* data, int bytes = 16) { return reinterpret_cast<std::uintptr_t>(data) % bytes == 0; }

// Throws Unsupported unless `view` is on a device of that type.
void expect_device(char const* operation, char const* argument, TensorView const& view, Device::Type type);

// Argument checks of one operation; messages name the argument, what was expected and what came.
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

  // dtype, device, at most kMaxRank dimensions, alignment of the pointer.
  void tensor(char const* argument, TensorView const& view, std::initializer_list<DType> dtypes) const;
  // Large operands are read 16 bytes at a time.
  void aligned16(char const* argument, TensorView const& view) const;
  // Rows must be dense and the leading dimensions must collapse into one.
  Matrix rows(char const* argument, TensorView const& view) const;
  void contiguous(char const* argument, TensorView const& view) const;
  // Exactly [count], contiguous.
  void vector(char const* argument, TensorView const& view, std::int64_t count) const;
  // Exactly that shape, contiguous.
  void shape(char const* argument, TensorView const& view, std::initializer_list<std::int64_t> shape) const;
  // rows() of a result: the leading dimensions of `of`, and `cols` columns, or at least as many if it may be padded.
  Matrix rows_like(char const* argument, TensorView const& view, char const* of_argument, TensorView const& of,
                   std::int64_t cols, bool may_be_padded = false) const;
  // x […, k] and out […, n] of x's dtype, in memory apart, and bias() of a product.
  ProductRows product(TensorView const& x, TensorView const& out, std::optional<TensorView> const& bias, std::int64_t n,
                      std::int64_t k) const;
  // A product's bias, if there is one: [count] of out's dtype, in memory apart from it.
  void bias(std::optional<TensorView> const& bias, TensorView const& out, std::int64_t count) const;
  void clamp(float lo, float hi) const;
  void scalar(char const* argument, TensorView const& view) const;
  // One element, [count], [1, count] or [count, 1] (the shape of per-row weight scales), contiguous.
  void scalar_or_columns(char const* argument, TensorView const& view, std::int64_t count) const;
  // A value for each of the R rows of `of` […, K]: [R], [R, 1], or the leading dimensions of `of` with or without a
  // last dimension of 1; contiguous.
  void row_values(char const* argument, TensorView const& view, char const* of_argument, TensorView const& of) const;
  void scalar_or_rows(char const* argument, TensorView const& view, char const* of_argument,
                      TensorView const& of) const;
  // [rows, cols], or `leading` dimensions of such matrices, dense along rows or columns.
  ScaleGrid scale_grid(char const* argument, TensorView const& view, std::int64_t rows, std::int64_t cols,
                       std::span<std::int64_t const> leading = {}) const;
  void apart(char const* argument, TensorView const& out, char const* other_argument, TensorView const& other) const;

 private:
  char const* operation_;
  Device device_;
};

}  // namespace epiloq
