#pragma once

#include <stdexcept>
#include <string>

#include "epiloq/export.h"

namespace epiloq {

// Base of everything that epiloq throws. Messages read "operation: argument: expected ..., got ...".
class EPILOQ_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An argument does not fit the operation. Thrown before anything is launched.
class EPILOQ_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

// The arguments are right, but this build or this device has no kernel for them.
class EPILOQ_API Unsupported : public Error {
 public:
  using Error::Error;
};

// The CUDA runtime refused a call.
class EPILOQ_API CudaError : public Error {
 public:
  using Error::Error;
};

}  // namespace epiloq
