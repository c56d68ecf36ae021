#include "bindings/granularity.h"
#include "bindings/register.h"
#include "bindings/torch_state.h"
#include "epiloq/rms_norm_quant.h"

namespace epiloq::bindings {

void register_rms_norm_quant(py::module_& module) {
  using Optional = std::optional<TensorArg>;
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& q, TensorArg const& x, TensorArg const& weight, TensorArg const& scale,
                 Optional const& residual, Optional const& residual_out, float eps, std::string const& granularity,
                 int group_size, bool ue8m0) {
          return action(RmsNormQuant{q.view, x.view, weight.view, scale.view, view_of(residual), view_of(residual_out),
                                     eps, parse_granularity("rms_norm_quant", granularity), group_size, ue8m0},
                        x);
        },
        py::arg("q"), py::arg("x"), py::arg("weight"), py::arg("scale"), py::arg("residual"), py::arg("residual_out"),
        py::arg("eps"), py::arg("granularity"), py::arg("group_size"), py::arg("ue8m0"));
  };
  define("rms_norm_quant", [](auto const& call, TensorArg const& x) {
    run_with_threads(call, x, [](auto const& given, Stream stream) { rms_norm_quant(given, stream); });
  });
  define("explain_rms_norm_quant", [](RmsNormQuant const& call, TensorArg const&) { return explain(call); });
}

}  // namespace epiloq::bindings
