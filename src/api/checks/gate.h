#pragma once

#include "core/checks.h"
#include "epiloq/gate.h"

namespace epiloq {

// Checks the numbers of a gate. An offset of 0 becomes -0, which added to a factor gives its bits, also those of -0.
Gate check_gate(Checker const& check, Gate gate);

}  // namespace epiloq
