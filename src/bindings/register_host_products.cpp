#include "bindings/register.h"
#include "epiloq/host_int8.h"

namespace epiloq::bindings {

void register_host_products(py::module_& module) {
  module.def(
      "multiply_int8",
      [](TensorArg const& out, TensorArg const& a, TensorArg const& b, int threads) {
        py::gil_scoped_release const released;
        multiply_int8(out.view, a.view, b.view, threads);
      },
      py::arg("out"), py::arg("a"), py::arg("b"), py::arg("threads") = 1);
}

}  // namespace epiloq::bindings
