#pragma once

// Distribution of CPU work over the application's threads (epiloq/threads.h).

#include <algorithm>
#include <cstdint>

#include "epiloq/threads.h"

namespace epiloq {

using RangeCall = void (*)(void const* body, std::int64_t first, std::int64_t last);

// body(first, last) for ranges that together are 0 to count - 1, a few for each of at most `threads` threads. What a
// body throws is thrown again, on this thread.
void share(std::int64_t count, int threads, void const* body, RangeCall call);

template <class Body>
void share(std::int64_t count, int threads, Body const& body) {
  share(count, threads, &body,
        [](void const* b, std::int64_t first, std::int64_t last) { (*static_cast<Body const*>(b))(first, last); });
}

}  // namespace epiloq
