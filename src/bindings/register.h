#pragma once

#include "bindings/dlpack.h"

namespace epiloq::bindings {

void register_scaled_mm(py::module_& module);
void register_quantize_int8(py::module_& module);
void register_weight_only_mm(py::module_& module);

}  // namespace epiloq::bindings
