#include "bindings/granularity.h"
#include "bindings/register.h"
#include "epiloq/quantize_fp8.h"

namespace epiloq::bindings {

void register_quantize_fp8(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& q, TensorArg const& x, TensorArg const& scale, std::string const& granularity,
                 int group_size, bool is_static, bool ue8m0, float eps, std::optional<TensorArg> const& scale_ub) {
          return action(QuantizeFp8{q.view, x.view, scale.view, parse_granularity("quantize_fp8", granularity),
                                    group_size, is_static, ue8m0, eps, view_of(scale_ub)},
                        x);
        },
        py::arg("q"), py::arg("x"), py::arg("scale"), py::arg("granularity"), py::arg("group_size"),
        py::arg("is_static"), py::arg("ue8m0"), py::arg("eps"), py::arg("scale_ub"));
  };
  define("quantize_fp8", [](QuantizeFp8 const& call, TensorArg const& x) { quantize_fp8(call, current_stream(x)); });
  define("explain_quantize_fp8", [](QuantizeFp8 const& call, TensorArg const&) { return explain(call); });
}

}  // namespace epiloq::bindings
