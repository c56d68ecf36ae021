#include "bindings/register.h"
#include "epiloq/host_float8.h"
#include "epiloq/host_int8.h"

namespace epiloq::bindings {
namespace {

using Optional = std::optional<TensorArg>;

HostFloat8 matrix_of(TensorArg const& values, Optional const& scale, std::int64_t scale_rows,
                     std::int64_t scale_columns) {
  return {values.view, view_of(scale), scale_rows, scale_columns};
}

}  // namespace

void register_host_products(py::module_& module) {
  module.def(
      "widen_float8",
      [](TensorArg const& out, TensorArg const& values, Optional const& scale, std::int64_t scale_rows,
         std::int64_t scale_columns, int threads) {
        py::gil_scoped_release const released;
        widen_float8(out.view, matrix_of(values, scale, scale_rows, scale_columns), threads);
      },
      py::arg("out"), py::arg("values"), py::arg("scale") = py::none(), py::arg("scale_rows") = 1,
      py::arg("scale_columns") = 128, py::arg("threads") = 1);
  module.def(
      "multiply_float8",
      [](TensorArg const& out, TensorArg const& x, TensorArg const& values, Optional const& scale,
         std::int64_t scale_rows, std::int64_t scale_columns, int threads) {
        py::gil_scoped_release const released;
        multiply_float8(out.view, x.view, matrix_of(values, scale, scale_rows, scale_columns), threads);
      },
      py::arg("out"), py::arg("x"), py::arg("values"), py::arg("scale") = py::none(), py::arg("scale_rows") = 1,
      py::arg("scale_columns") = 128, py::arg("threads") = 1);
  module.def("multiplies_float8", &multiplies_float8);
  module.def(
      "multiply_float8_by_float8",
      [](TensorArg const& out, TensorArg const& x, Optional const& scale_x, std::int64_t scale_rows_x,
         TensorArg const& values, Optional const& scale, std::int64_t scale_rows, int threads) {
        py::gil_scoped_release const released;
        constexpr std::int64_t kColumns = 128;
        multiply_float8(out.view, matrix_of(x, scale_x, scale_rows_x, kColumns),
                        matrix_of(values, scale, scale_rows, kColumns), threads);
      },
      py::arg("out"), py::arg("x"), py::arg("scale_x"), py::arg("scale_rows_x"), py::arg("values"), py::arg("scale"),
      py::arg("scale_rows"), py::arg("threads") = 1);
  module.def(
      "multiply_int8",
      [](TensorArg const& out, TensorArg const& a, TensorArg const& b, int threads) {
        py::gil_scoped_release const released;
        multiply_int8(out.view, a.view, b.view, threads);
      },
      py::arg("out"), py::arg("a"), py::arg("b"), py::arg("threads") = 1);
}

}  // namespace epiloq::bindings
