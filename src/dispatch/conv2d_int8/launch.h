#pragma once

#include "core/target.h"
#include "dispatch/conv2d_int8/select.h"
#include "problems/conv2d_int8.h"

namespace epiloq::ops::conv2d_int8 {

void launch(Choice const& choice, Problem const& problem, int device, Stream stream);

}  // namespace epiloq::ops::conv2d_int8
