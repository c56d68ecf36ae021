#pragma once

#include <cuda_runtime_api.h>

namespace epiloq {

using SharedAddress = emulated::Address;
inline SharedAddress shared_address(void const* pointer) { return emulated::address_of(pointer); }

inline void cp_async16(SharedAddress to, void const* from) { emulated::copy_small(to, from, 16); }
inline void cp_async16(SharedAddress to, void const* from, int bytes) { emulated::copy_small(to, from, bytes, 16); }
inline void cp_async4(SharedAddress to, void const* from) { emulated::copy_small(to, from, 4); }
inline void cp_async_commit() { emulated::commit_small_copies(); }
template <int kPending>
void cp_async_wait() {
  emulated::wait_for_small_copies(kPending);
}

}  // namespace epiloq
