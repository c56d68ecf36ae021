#pragma once

// Function multiversioning: one instance of a CPU kernel per instruction set, chosen at run time.

#include "cpu/common/rows.h"

namespace epiloq {

// 32-bit lanes of the vector registers that this CPU supports.
inline int lanes_here() {
#ifdef EPILOQ_HAS_CLONES
  if (__builtin_cpu_supports("x86-64-v4")) return 16;
  if (__builtin_cpu_supports("x86-64-v3")) return 8;
#endif
  return 4;
}

// Kernel<lanes>::run, compiled for each register width.
template <template <int kLanes> class Kernel, class... Arguments>
struct Versions {
  using Function = void (*)(Arguments...);

  static void plain(Arguments... arguments) { Kernel<4>::run(arguments...); }
#ifdef EPILOQ_HAS_CLONES
  [[gnu::target("arch=x86-64-v3")]] static void v3(Arguments... arguments) { Kernel<8>::run(arguments...); }
  [[gnu::target("arch=x86-64-v4")]] static void v4(Arguments... arguments) { Kernel<16>::run(arguments...); }
#endif

  static Function here() {
#ifdef EPILOQ_HAS_CLONES
    if (lanes_here() == 16) return v4;
    if (lanes_here() == 8) return v3;
#endif
    return plain;
  }
};

}  // namespace epiloq
