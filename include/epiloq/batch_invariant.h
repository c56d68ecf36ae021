#pragma once

#include <optional>

#include "epiloq/export.h"

namespace epiloq {

// With batch invariance a row of tokens has the same bits whatever other rows the call has: products use only kernels
// that sum K in the same order for every M, and throw Unsupported if there is none. Off by default.
EPILOQ_API void set_batch_invariant(bool on);  // for every thread without a setting of its own
// This thread's own setting; nullopt: none.
EPILOQ_API void set_batch_invariant_here(std::optional<bool> on);
EPILOQ_API std::optional<bool> batch_invariant_here();
// What applies to calls made by this thread.
EPILOQ_API bool batch_invariant();

}  // namespace epiloq
