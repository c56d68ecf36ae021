#include "bindings/register.h"
#include "epiloq/scaled_bmm.h"

namespace epiloq::bindings {

void register_scaled_bmm(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& a, TensorArg const& b, TensorArg const& scale_a,
                 TensorArg const& scale_b, std::optional<TensorArg> const& scale_out, int threads) {
          return action(ScaledBmm{out.view, a.view, b.view, scale_a.view, scale_b.view, view_of(scale_out), threads},
                        a);
        },
        py::arg("out"), py::arg("a"), py::arg("b"), py::arg("scale_a"), py::arg("scale_b"),
        py::arg("scale_out") = py::none(), py::arg("threads") = 1);
  };
  define("scaled_bmm", [](ScaledBmm const& call, TensorArg const& a) { scaled_bmm(call, current_stream(a)); });
  define("scaled_bmm_on_host", [](ScaledBmm const& call, TensorArg const&) {
    py::gil_scoped_release const released;
    scaled_bmm(call);
  });
  define("explain_scaled_bmm", [](ScaledBmm const& call, TensorArg const&) { return explain(call); });
}

}  // namespace epiloq::bindings
