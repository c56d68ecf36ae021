#include "bindings/geometry.h"
#include "bindings/register.h"
#include "epiloq/conv2d_int8.h"

namespace epiloq::bindings {

void register_conv2d_int8(py::module_& module) {
  using Optional = std::optional<TensorArg>;
  using KernelArg = std::pair<int, int>;  // row and split
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, TensorArg const& weight, TensorArg const& scale,
                 Optional const& bias, Optional const& correction, int input_zero, int output_zero, float lo, float hi,
                 Pair const& stride, Sides const& padding, Pair const& dilation, std::int64_t groups,
                 std::optional<KernelArg> const& kernel) {
          Conv2dInt8 call{out.view,
                          x.view,
                          weight.view,
                          scale.view,
                          view_of(bias),
                          view_of(correction),
                          input_zero,
                          output_zero,
                          lo,
                          hi,
                          {stride, padding, dilation, groups}};
          if (kernel) call.kernel = {kernel->first, kernel->second};
          return action(call, x);
        },
        py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("scale"), py::arg("bias"), py::arg("correction"),
        py::arg("input_zero"), py::arg("output_zero"), py::arg("lo"), py::arg("hi"), py::arg("stride"),
        py::arg("padding"), py::arg("dilation"), py::arg("groups"), py::arg("kernel") = py::none());
  };
  define("conv2d_int8", [](Conv2dInt8 const& call, TensorArg const& x) { conv2d_int8(call, current_stream(x)); });
  define("check_conv2d_int8", [](Conv2dInt8 const& call, TensorArg const&) { check(call); });
  define("explain_conv2d_int8", [](Conv2dInt8 const& call, TensorArg const&) { return explain(call); });
  module.def(
      "finish_conv2d_int8",
      [](TensorArg const& out, TensorArg const& acc, TensorArg const& scale, Optional const& bias,
         Optional const& correction, int output_zero, float lo, float hi) {
        Conv2dInt8 call;
        call.out = out.view;
        call.scale = scale.view;
        call.bias = view_of(bias);
        call.correction = view_of(correction);
        call.output_zero = output_zero;
        call.lo = lo;
        call.hi = hi;
        finish_conv2d_int8(acc.view, call);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("out"), py::arg("acc"), py::arg("scale"), py::arg("bias"),
      py::arg("correction"), py::arg("output_zero"), py::arg("lo"), py::arg("hi"));
}

}  // namespace epiloq::bindings
