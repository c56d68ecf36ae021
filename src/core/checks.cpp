#include "core/checks.h"

#include <algorithm>
#include <utility>

#include "epiloq/granularity.h"

namespace epiloq {
namespace {

std::string describe(Device device) {
  if (device.type == Device::Type::kOther) return "neither the CPU nor CUDA";
  return device.type == Device::Type::kCpu ? "the CPU" : "cuda:" + std::to_string(device.index);
}

// The bytes from a view's first element to past its last.
std::pair<std::uintptr_t, std::uintptr_t> extent(TensorView const& view) {
  if (view.numel() == 0) return {0, 0};
  std::int64_t low = 0, high = 0;
  for (int i = 0; i < view.rank; ++i) {
    std::int64_t const reach = (view.shape[i] - 1) * view.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  auto const base = reinterpret_cast<std::uintptr_t>(view.data);
  int const bytes = size_of(view.dtype);
  return {base + low * bytes, base + (high + 1) * bytes};
}

bool dense(TensorView const& view) {
  if (view.numel() == 0) return true;
  std::int64_t expected = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.shape[i] != 1 && view.strides[i] != expected) return false;
    expected *= view.shape[i];
  }
  return true;
}

constexpr char const* kNames[] = {"int8", "int32", "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2",
                                  "bool", "uint8", "int16",   "int64",    "float64", "another dtype"};

// The enumerator's name, or the last name for a value outside the enumeration.
template <class Enumeration, std::size_t kCount>
char const* name_in(char const* const (&names)[kCount], Enumeration value) {
  return names[std::min(static_cast<std::size_t>(value), kCount - 1)];
}
}  // namespace

char const* name(DType dtype) { return name_in(kNames, dtype); }

DType parse_dtype(std::string const& text) {
  auto const* const found = std::find(std::begin(kNames), std::end(kNames), text);
  if (found == std::end(kNames)) throw InvalidArgument("epiloq: dtype: expected a name such as int8, got " + text);
  return static_cast<DType>(found - kNames);
}

char const* name(Granularity granularity) {
  constexpr char const* kNames[] = {"tensor", "token", "group", "block", "another granularity"};
  return name_in(kNames, granularity);
}

std::string describe(TensorView const& view) {
  std::ostringstream text;
  text << name(view.dtype) << " [";
  for (int i = 0; i < std::min(view.rank, TensorView::kMaxRank); ++i) text << (i ? ", " : "") << view.shape[i];
  text << (view.rank > TensorView::kMaxRank ? ", …] on " : "] on ") << describe(view.device);
  return text.str();
}

void expect_device(char const* operation, char const* argument, TensorView const& view, Device::Type type) {
  if (view.device.type == type) return;
  throw Unsupported(std::string("epiloq.") + operation + ": " + argument + ": expected a tensor on " +
                    (type == Device::Type::kCpu ? "the CPU" : "a CUDA device") + ", got " + describe(view));
}

void Checker::tensor(char const* argument, TensorView const& view, std::initializer_list<DType> dtypes) const {
  if (view.device.type == Device::Type::kOther) {
    fail(argument, "expected dense memory on the CPU or a CUDA device, got a meta, sparse or otherwise foreign tensor");
  }
  if (std::find(dtypes.begin(), dtypes.end(), view.dtype) == dtypes.end()) {
    std::string expected;
    for (DType dtype : dtypes) expected += (expected.empty() ? "" : " or ") + std::string(name(dtype));
    fail(argument, "expected ", expected, ", got ", describe(view));
  }
  if (view.rank < 0 || view.rank > TensorView::kMaxRank) {
    fail(argument, "expected at most ", TensorView::kMaxRank, " dimensions, got ", view.rank);
  }
  if (std::any_of(view.shape.begin(), view.shape.begin() + view.rank, [](std::int64_t size) { return size < 0; })) {
    fail(argument, "expected no negative sizes, got ", describe(view));
  }
  if (view.device != device_) fail(argument, "expected a tensor on ", describe(device_), ", got ", describe(view));
  if (view.data == nullptr && view.numel() != 0) {
    fail(argument, "expected memory, got ", describe(view), " without any (its storage was freed, or never allocated)");
  }
  if (!is_aligned(view.data, size_of(view.dtype))) {
    fail(argument, "expected a pointer aligned to its ", size_of(view.dtype), "-byte elements, got ", view.data);
  }
}

void Checker::aligned16(char const* argument, TensorView const& view) const {
  if (view.numel() != 0 && !is_aligned(view.data)) {
    fail(argument, "expected a pointer aligned to 16 bytes, got ", view.data,
         " (a view that starts inside a row? .clone() gives aligned memory)");
  }
}

Matrix Checker::rows(char const* argument, TensorView const& view) const {
  if (view.rank < 1) fail(argument, "expected at least one dimension, got ", describe(view));
  std::int64_t const cols = view.size(-1);
  if (cols > 1 && view.stride(-1) != 1 && view.numel() != 0) {
    fail(argument, "expected row-major memory (stride 1 in the last dimension), got ", describe(view), " with stride ",
         view.stride(-1), "; call .contiguous()");
  }
  for (int i = 0; i < view.rank - 1; ++i) {
    if (view.shape[i] == 0) return {0, cols, cols};
  }
  // From the innermost row dimension outwards: each stride must continue the one inside it.
  std::int64_t rows = 1, stride = cols;
  for (int i = view.rank - 2; i >= 0; --i) {
    if (view.shape[i] == 1) continue;
    if (rows == 1) {
      stride = view.strides[i];
    } else if (view.strides[i] != stride * rows) {
      fail(argument, "expected leading dimensions that collapse into one, got strides ", view.strides[i], " and ",
           stride, " in ", describe(view), "; call .contiguous()");
    }
    rows *= view.shape[i];
  }
  if (rows > 1 && stride < cols) {
    fail(argument, "expected rows that do not overlap, got a row stride of ", stride, " in ", describe(view));
  }
  return {rows, cols, std::max(stride, cols)};
}

void Checker::contiguous(char const* argument, TensorView const& view) const {
  if (!dense(view)) fail(argument, "expected contiguous memory, got ", describe(view), "; call .contiguous()");
}

void Checker::vector(char const* argument, TensorView const& view, std::int64_t count) const {
  if (view.rank != 1 || view.shape[0] != count) fail(argument, "expected shape [", count, "], got ", describe(view));
  contiguous(argument, view);
}

void Checker::shape(char const* argument, TensorView const& view, std::initializer_list<std::int64_t> shape) const {
  if (!std::equal(shape.begin(), shape.end(), view.shape.begin(), view.shape.begin() + view.rank)) {
    std::string expected;
    for (std::int64_t size : shape) expected += (expected.empty() ? "" : ", ") + std::to_string(size);
    fail(argument, "expected [", expected, "], got ", describe(view));
  }
  contiguous(argument, view);
}

Matrix Checker::rows_like(char const* argument, TensorView const& view, char const* of_argument, TensorView const& of,
                          std::int64_t cols, bool may_be_padded) const {
  Matrix const matrix = rows(argument, view);
  bool const same_rows =
      view.rank == of.rank && std::equal(of.shape.begin(), of.shape.begin() + of.rank - 1, view.shape.begin());
  if (!same_rows || (may_be_padded ? matrix.cols < cols : matrix.cols != cols)) {
    fail(argument, "expected ", of_argument, "'s leading dimensions and ", may_be_padded ? "at least " : "", cols,
         " columns, got ", describe(view));
  }
  return matrix;
}

ProductRows Checker::product(TensorView const& x, TensorView const& out, std::optional<TensorView> const& with_bias,
                             std::int64_t n, std::int64_t k) const {
  Matrix const tokens = rows("x", x);
  if (tokens.cols != k) fail("x", "expected ", k, " columns, got ", describe(x));
  tensor("out", out, {x.dtype});
  Matrix const result = rows_like("out", out, "x", x, n);
  bias(with_bias, out, n);
  apart("out", out, "x", x);
  return {tokens, result};
}

void Checker::bias(std::optional<TensorView> const& bias, TensorView const& out, std::int64_t count) const {
  if (!bias) return;
  tensor("bias", *bias, {out.dtype});
  vector("bias", *bias, count);
  apart("out", out, "bias", *bias);
}

void Checker::clamp(float lo, float hi) const {
  if (!(lo <= hi)) fail("clamp", "expected lo <= hi, got (", lo, ", ", hi, ")");
}

void Checker::scalar(char const* argument, TensorView const& view) const {
  if (view.numel() != 1) fail(argument, "expected one element, got ", describe(view));
}

void Checker::scalar_or_columns(char const* argument, TensorView const& view, std::int64_t count) const {
  bool const is_column = view.rank == 1 || (view.rank == 2 && (view.shape[0] == 1 || view.shape[1] == 1));
  if (view.numel() != 1 && !(is_column && view.numel() == count)) {
    fail(argument, "expected one element, [", count, "], [1, ", count, "] or [", count, ", 1], got ", describe(view));
  }
  contiguous(argument, view);
}

void Checker::row_values(char const* argument, TensorView const& view, char const* of_argument,
                         TensorView const& of) const {
  int const leading = of.rank - 1;
  std::int64_t rows = 1;
  for (int i = 0; i < leading; ++i) rows *= of.shape[i];
  bool const flat = (view.rank == 1 || (view.rank == 2 && view.shape[1] == 1)) && view.shape[0] == rows;
  bool const alike = (view.rank == leading || (view.rank == of.rank && view.size(-1) == 1)) &&
                     std::equal(of.shape.begin(), of.shape.begin() + leading, view.shape.begin());
  if (!flat && !alike && !(rows == 1 && view.numel() == 1)) {
    fail(argument, "expected a value a row of ", of_argument, ", [", rows, "], [", rows, ", 1] or ", of_argument,
         "'s leading dimensions, then 1, got ", describe(view));
  }
  contiguous(argument, view);
}

void Checker::scalar_or_rows(char const* argument, TensorView const& view, char const* of_argument,
                             TensorView const& of) const {
  if (view.numel() != 1) row_values(argument, view, of_argument, of);
}

ScaleGrid Checker::scale_grid(char const* argument, TensorView const& view, std::int64_t rows, std::int64_t cols,
                              std::span<std::int64_t const> leading) const {
  bool const flat = view.rank == 2 && view.shape[0] == rows;
  bool const alike = view.rank == static_cast<int>(leading.size()) + 1 &&
                     std::equal(leading.begin(), leading.end(), view.shape.begin());
  if (!(flat || alike) || view.size(-1) != cols || view.numel() != rows * cols) {
    fail(argument, "expected shape [", rows, ", ", cols, "], got ", describe(view));
  }
  if (view.numel() == 0) return {rows, cols, cols, 1};
  auto const refuse = [&] {
    fail(argument,
         "expected dense rows, or dense columns whose rows collapse into one dimension, got strides that are "
         "neither in ",
         describe(view), "; call .contiguous()");
  };
  // From the innermost row dimension outwards: each stride must continue the one inside it.
  std::int64_t collapsed = 1, row_stride = 0;
  for (int i = view.rank - 2; i >= 0; --i) {
    if (view.shape[i] == 1) continue;
    if (collapsed == 1) row_stride = view.strides[i];
    if (view.strides[i] != row_stride * collapsed) refuse();
    collapsed *= view.shape[i];
  }
  std::int64_t const col_stride = cols == 1 ? 0 : view.stride(-1);
  bool const by_rows = (cols == 1 || col_stride == 1) && (rows == 1 || row_stride >= cols);
  bool const by_columns = (rows == 1 || row_stride == 1) && (cols == 1 || col_stride >= rows);
  if (!by_rows && !by_columns) refuse();
  return {rows, cols, row_stride, col_stride};
}

void Checker::apart(char const* argument, TensorView const& out, char const* other_argument,
                    TensorView const& other) const {
  auto const [out_begin, out_end] = extent(out);
  auto const [begin, end] = extent(other);
  if (out_begin < end && begin < out_end) {
    fail(argument, "expected memory apart from ", other_argument, "'s, got one that overlaps it");
  }
}

}  // namespace epiloq
