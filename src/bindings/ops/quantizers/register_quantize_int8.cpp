#include "bindings/register.h"
#include "epiloq/quantize_int8.h"

namespace epiloq::bindings {

void register_quantize_int8(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& q, TensorArg const& x, TensorArg const& scale, std::optional<TensorArg> const& azp,
                 bool is_static, bool range_includes_zero) {
          action(QuantizeInt8{q.view, x.view, scale.view, view_of(azp), is_static, range_includes_zero}, x);
        },
        py::arg("q"), py::arg("x"), py::arg("scale"), py::arg("azp") = py::none(), py::arg("is_static") = false,
        py::arg("range_includes_zero") = true);
  };
  define("quantize_int8", [](QuantizeInt8 const& call, TensorArg const& x) { quantize_int8(call, current_stream(x)); });
  define("check_quantize_int8", [](QuantizeInt8 const& call, TensorArg const&) { check(call); });
}

}  // namespace epiloq::bindings
