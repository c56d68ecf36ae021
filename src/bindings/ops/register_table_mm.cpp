#include "bindings/register.h"
#include "epiloq/table_mm.h"

namespace epiloq::bindings {

void register_table_mm(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, TensorArg const& codes, TensorArg const& table,
                 TensorArg const& scale, std::optional<TensorArg> const& bias, std::int64_t n, std::int64_t k,
                 std::int64_t block_size, int threads) {
          TableWeight const weight{codes.view, table.view, scale.view, n, k, block_size};
          return action(TableMm{out.view, x.view, weight, view_of(bias), threads}, x);
        },
        py::arg("out"), py::arg("x"), py::arg("codes"), py::arg("table"), py::arg("scale"), py::arg("bias"),
        py::arg("n"), py::arg("k"), py::arg("block_size"), py::arg("threads") = 1);
  };
  define("table_mm", [](TableMm const& call, TensorArg const& x) {
    Stream const stream = current_stream(x);
    std::optional<py::gil_scoped_release> released;
    if (x.view.device.type == Device::Type::kCpu) released.emplace();
    return table_mm(call, stream);
  });
  define("explain_table_mm", [](TableMm const& call, TensorArg const&) { return explain(call); });
  module.def(
      "dequantize_table",
      [](TensorArg const& out, TensorArg const& codes, TensorArg const& table, TensorArg const& scale, std::int64_t n,
         std::int64_t k, std::int64_t block_size, int threads) {
        TableWeight const weight{codes.view, table.view, scale.view, n, k, block_size};
        Stream const stream = current_stream(out);
        std::optional<py::gil_scoped_release> released;
        if (out.view.device.type == Device::Type::kCpu) released.emplace();
        dequantize_table({out.view, weight, threads}, stream);
      },
      py::arg("out"), py::arg("codes"), py::arg("table"), py::arg("scale"), py::arg("n"), py::arg("k"),
      py::arg("block_size"), py::arg("threads") = 1);
}

}  // namespace epiloq::bindings
