#pragma once

#include "machine.h"

namespace cute {

inline unsigned block_rank_in_cluster() { return emulated::rank_in_cluster(); }
inline bool elect_one_sync() { return emulated::elect(); }

}  // namespace cute
