#pragma once

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// out = table[x + 128], on the CPU: any function of int8 to int8.
struct LookupInt8 {
  TensorView out;    // […, K] int8, rows dense
  TensorView x;      // the same shape, int8, rows dense
  TensorView table;  // [256] int8, of -128 to 127
};

// Throws InvalidArgument where an argument does not fit.
EPILOQ_API void lookup_int8(LookupInt8 const& call);

}  // namespace epiloq
