#pragma once

#include <cuda.h>

namespace cute {

inline void prefetch_tma_descriptor(CUtensorMap const*) {}

}  // namespace cute
