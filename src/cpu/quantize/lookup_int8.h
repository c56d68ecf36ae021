#pragma once

#include <cstdint>

namespace epiloq::ops::lookup_int8 {

// out[i] = table[x[i]] for `count` values; `table` is in the order of the bits of x: 0 to 127, then -128 to -1.
void lookup(std::int8_t const* x, std::int64_t count, std::int8_t const* table, std::int8_t* out);

}  // namespace epiloq::ops::lookup_int8
