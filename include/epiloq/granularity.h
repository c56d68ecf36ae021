#pragma once

#include <cstdint>

#include "epiloq/export.h"

namespace epiloq {

// What shares a scale: everything, a row, a run of `group_size` elements of a row, or a square of that side.
enum class Granularity : std::uint8_t { kTensor, kToken, kGroup, kBlock };

EPILOQ_API char const* name(Granularity granularity);

}  // namespace epiloq
