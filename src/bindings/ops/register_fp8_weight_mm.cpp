#include "bindings/register.h"
#include "epiloq/fp8_weight_mm.h"

namespace epiloq::bindings {

void register_fp8_weight_mm(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, TensorArg const& weight, TensorArg const& scale,
                 std::optional<TensorArg> const& bias, std::int64_t block_rows, std::int64_t block_columns,
                 int threads) {
          Fp8Weight const of{weight.view, scale.view, block_rows, block_columns};
          return action(Fp8WeightMm{out.view, x.view, of, view_of(bias), threads}, x);
        },
        py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("scale"), py::arg("bias"), py::arg("block_rows"),
        py::arg("block_columns"), py::arg("threads") = 1);
  };
  define("fp8_weight_mm", [](Fp8WeightMm const& call, TensorArg const& x) {
    Stream const stream = current_stream(x);
    std::optional<py::gil_scoped_release> released;
    if (x.view.device.type == Device::Type::kCpu) released.emplace();
    return fp8_weight_mm(call, stream);
  });
  define("explain_fp8_weight_mm", [](Fp8WeightMm const& call, TensorArg const&) { return explain(call); });
  module.def(
      "dequantize_fp8",
      [](TensorArg const& out, TensorArg const& weight, TensorArg const& scale, std::int64_t block_rows,
         std::int64_t block_columns, std::int64_t first_row, int threads) {
        Fp8Weight const of{weight.view, scale.view, block_rows, block_columns};
        Stream const stream = current_stream(out);
        std::optional<py::gil_scoped_release> released;
        if (out.view.device.type == Device::Type::kCpu) released.emplace();
        dequantize_fp8({out.view, of, first_row, threads}, stream);
      },
      py::arg("out"), py::arg("weight"), py::arg("scale"), py::arg("block_rows"), py::arg("block_columns"),
      py::arg("first_row") = 0, py::arg("threads") = 1);
}

}  // namespace epiloq::bindings
