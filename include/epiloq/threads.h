#pragma once

#include "epiloq/export.h"

namespace epiloq {

// GOMP_parallel, of libgomp or of an OpenMP runtime that has its entry points (LLVM's, Intel's): `threads` threads each
// call body(data).
using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// The library starts no threads of its own: a second pool beside an application's would take cores from it. An
// application lends its own here, once; until then, and in a child that it forks, whose copy of a pool has no threads,
// calls run on the thread that makes them. Python lends torch's.
EPILOQ_API void use_openmp(OpenMpParallel parallel);

}  // namespace epiloq
