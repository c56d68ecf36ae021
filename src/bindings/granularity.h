#pragma once

#include <string>

#include "epiloq/error.h"
#include "epiloq/granularity.h"

namespace epiloq::bindings {

inline Granularity parse_granularity(char const* operation, std::string const& text) {
  using enum Granularity;
  for (Granularity granularity : {kTensor, kToken, kGroup, kBlock}) {
    if (text == name(granularity)) return granularity;
  }
  throw InvalidArgument(std::string("epiloq.") + operation +
                        ": granularity: expected tensor, token, group or block, got " + text);
}

}  // namespace epiloq::bindings
