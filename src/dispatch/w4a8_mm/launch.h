#pragma once

#include "dispatch/w4a8_mm/select.h"
#include "problems/w4a8_mm.h"

namespace epiloq::ops::w4a8_mm {

// Permutes the tokens and multiplies them.
void launch(Choice const& choice, Problem const& problem, DType out, int device, Stream stream);

}  // namespace epiloq::ops::w4a8_mm
