#include "bindings/register.h"
#include "bindings/torch_state.h"
#include "epiloq/rms_norm.h"

namespace epiloq::bindings {

void register_rms_norm(py::module_& module) {
  using Optional = std::optional<TensorArg>;
  auto const launch = [](RmsNorm const& call, Stream stream) { rms_norm(call, stream); };
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, TensorArg const& weight, Optional const& residual,
                 Optional const& residual_out, float eps) {
          return action(RmsNorm{out.view, x.view, weight.view, view_of(residual), view_of(residual_out), eps}, x);
        },
        py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("residual"), py::arg("residual_out"), py::arg("eps"));
  };
  define("rms_norm", [launch](RmsNorm const& call, TensorArg const& x) { run_with_threads(call, x, launch); });
  define("explain_rms_norm", [](RmsNorm const& call, TensorArg const&) { return explain(call); });
  // With new outputs: out, or (out, residual_out) if there is a residual.
  module.def(
      "new_rms_norm",
      [launch](py::object const& x_object, TensorArg const& weight, float eps, Optional const& residual) -> py::object {
        auto const x = x_object.cast<TensorArg>();
        RmsNorm call{x.view, x.view, weight.view, view_of(residual), view_of(residual), eps};
        if (!has_rows(x.view)) check(call);  // throws
        std::int64_t const cols = x.view.size(-1);
        py::object out = new_rows(x_object, x.view, cols), sum;
        call.out = out.cast<TensorArg>().view;
        if (residual) {
          sum = new_rows(x_object, x.view, cols);
          call.residual_out = sum.cast<TensorArg>().view;
        }
        run_with_threads(call, x, launch);
        return residual ? py::object(py::make_tuple(out, sum)) : out;
      },
      py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("residual"));
}

}  // namespace epiloq::bindings
