#pragma once

#include <cuda_runtime_api.h>

namespace epiloq {

using SharedAddress = emulated::Address;
inline SharedAddress shared_address(void const* pointer) { return emulated::address_of(pointer); }

inline void copy4(SharedAddress to, void const* from) { emulated::copy_small(to, from, 4); }
inline void commit_copies() { emulated::commit_small_copies(); }
template <int kPending>
void wait_for_copies() {
  emulated::wait_for_small_copies(kPending);
}

}  // namespace epiloq
