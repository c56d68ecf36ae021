#pragma once

#include <optional>

#include "epiloq/export.h"

namespace epiloq {

// With batch invariance a row of tokens gets the same bits whatever rows are beside it: products keep to kernels that
// sum K in one order for every M, and what has none throws Unsupported. Off by default.
EPILOQ_API void set_batch_invariant(bool on);  // for every thread without a setting of its own
// This thread's own setting; nullopt: none.
EPILOQ_API void set_batch_invariant_here(std::optional<bool> on);
EPILOQ_API std::optional<bool> batch_invariant_here();
// What applies to calls made by this thread.
EPILOQ_API bool batch_invariant();

}  // namespace epiloq
