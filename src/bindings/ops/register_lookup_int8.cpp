#include "bindings/register.h"
#include "epiloq/lookup_int8.h"

namespace epiloq::bindings {

void register_lookup_int8(py::module_& module) {
  module.def(
      "lookup_int8",
      [](TensorArg const& out, TensorArg const& x, TensorArg const& table) {
        lookup_int8({out.view, x.view, table.view});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("out"), py::arg("x"), py::arg("table"));
}

}  // namespace epiloq::bindings
