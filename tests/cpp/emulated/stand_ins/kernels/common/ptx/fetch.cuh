#pragma once

namespace epiloq {

inline void fetch_sector(void const*) {}

}  // namespace epiloq
