#pragma once

// int8 products on the CPU, exact in int32: slabs of weight rows, which threads share, by all tokens.

#include <cstdint>
#include <functional>
#include <string>

namespace epiloq {

// A [m, k] B^T, B [n, k].
struct Int8Product {
  int m, n, k;
  std::int8_t const *a, *b;
  std::int64_t stride_a, stride_b;
};

// Rows `row` to `row + count` of columns `column` to `column + columns`. At least kMostColumns may be read of a row.
struct Int8Sums {
  static constexpr int kMostColumns = 32;
  std::int32_t const* values;
  int stride;
  int row, count, column, columns;
};

// Calls finish(sums) of parts that together are the product, from at most `threads` threads.
void multiply_int8(Int8Product const& product, int threads, std::function<void(Int8Sums const&)> const& finish);
// What multiplies so many tokens, in words.
std::string describe_int8(std::int64_t tokens);

}  // namespace epiloq
