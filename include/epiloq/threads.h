#pragma once

#include "epiloq/export.h"

namespace epiloq {

// GOMP_parallel, of libgomp or of an OpenMP runtime that has its entry points (LLVM's, Intel's): `threads` threads each
// call body(data).
using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// The library starts no threads of its own: a second pool would compete with the application's for cores. An
// application passes its OpenMP runtime here once. Before that, and in a forked child (whose copy of the pool has no
// threads), calls run on the calling thread. The Python package passes torch's runtime.
EPILOQ_API void use_openmp(OpenMpParallel parallel);

}  // namespace epiloq
