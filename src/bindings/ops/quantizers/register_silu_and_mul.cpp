#include "bindings/register.h"
#include "bindings/torch_state.h"
#include "epiloq/silu_and_mul.h"

namespace epiloq::bindings {

void register_silu_and_mul(py::module_& module) {
  auto const launch = [](SiluAndMul const& call, Stream stream) { silu_and_mul(call, stream); };
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, float alpha, float limit, float offset, bool interleaved) {
          return action(SiluAndMul{out.view, x.view, {alpha, limit, offset}, interleaved}, x);
        },
        py::arg("out"), py::arg("x"), py::arg("alpha"), py::arg("limit"), py::arg("offset"), py::arg("interleaved"));
  };
  define("silu_and_mul", [launch](SiluAndMul const& call, TensorArg const& x) { run_with_threads(call, x, launch); });
  define("explain_silu_and_mul", [](SiluAndMul const& call, TensorArg const&) { return explain(call); });
  // With a new output.
  module.def(
      "new_silu_and_mul",
      [launch](py::object const& x_object, float alpha, float limit, float offset, bool interleaved) {
        auto const x = x_object.cast<TensorArg>();
        SiluAndMul call{x.view, x.view, {alpha, limit, offset}, interleaved};
        if (!has_rows(x.view)) check(call);  // throws
        py::object out = new_rows(x_object, x.view, x.view.size(-1) / 2);
        call.out = out.cast<TensorArg>().view;
        run_with_threads(call, x, launch);
        return out;
      },
      py::arg("x"), py::arg("alpha"), py::arg("limit"), py::arg("offset"), py::arg("interleaved"));
}

}  // namespace epiloq::bindings
