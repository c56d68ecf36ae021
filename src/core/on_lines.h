#pragma once

// Memory for tiles, whose rows are lines of the caches.

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace epiloq {

inline constexpr std::int64_t kLineBytes = 64;

template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(LineAllocator<U> const&) {}
  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{kLineBytes}));
  }
  void deallocate(T* memory, std::size_t) { ::operator delete(memory, std::align_val_t{kLineBytes}); }
  friend bool operator==(LineAllocator const&, LineAllocator const&) { return true; }
};

// A vector that begins on a line: as malloc leaves it, each row of a tile lies across two, and reading one takes up to
// twice as long.
template <class T>
using OnLines = std::vector<T, LineAllocator<T>>;

}  // namespace epiloq
