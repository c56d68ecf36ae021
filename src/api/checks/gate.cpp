#include "api/checks/gate.h"

#include <cmath>

namespace epiloq {

Gate check_gate(Checker const& check, Gate gate) {
  if (!(gate.alpha > 0.f) || std::isinf(gate.alpha)) {
    check.fail("alpha", "expected a positive finite number, got ", gate.alpha);
  }
  if (!(gate.limit > 0.f)) check.fail("limit", "expected a positive number, got ", gate.limit);
  if (!std::isfinite(gate.offset)) check.fail("offset", "expected a finite number, got ", gate.offset);
  if (gate.offset == 0.f) gate.offset = -0.f;
  return gate;
}

}  // namespace epiloq
