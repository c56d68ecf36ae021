#include "source_hash.h"

#include "epiloq/version.h"

namespace epiloq {

char const* source_hash() { return EPILOQ_SOURCE_HASH; }

}  // namespace epiloq
