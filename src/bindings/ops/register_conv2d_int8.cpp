#include "bindings/geometry.h"
#include "bindings/register.h"
#include "epiloq/conv2d_int8.h"

namespace epiloq::bindings {

void register_conv2d_int8(py::module_& module) {
  using Optional = std::optional<TensorArg>;
  using Kernel = std::optional<std::pair<int, int>>;
  // `last`: the last argument's name and default; `action` receives its value.
  auto const define = [&module]<class Last>(char const* name, char const* last, Last none, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, TensorArg const& weight, TensorArg const& scale,
                 Optional const& bias, Optional const& correction, int input_zero, int output_zero, float lo, float hi,
                 Pair const& stride, Sides const& padding, Pair const& dilation, std::int64_t groups,
                 Last const& given) {
          Conv2dInt8 const call{out.view,
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
          return action(call, x, given);
        },
        py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("scale"), py::arg("bias"), py::arg("correction"),
        py::arg("input_zero"), py::arg("output_zero"), py::arg("lo"), py::arg("hi"), py::arg("stride"),
        py::arg("padding"), py::arg("dilation"), py::arg("groups"), py::arg(last) = none);
  };
  auto const by = [](Conv2dInt8 call, Kernel const& kernel) {
    if (kernel) call.kernel = {kernel->first, kernel->second};
    return call;
  };
  define("conv2d_int8", "kernel", Kernel{}, [by](Conv2dInt8 const& call, TensorArg const& x, Kernel const& kernel) {
    conv2d_int8(by(call, kernel), current_stream(x));
  });
  define("explain_conv2d_int8", "kernel", Kernel{},
         [by](Conv2dInt8 const& call, TensorArg const&, Kernel const& kernel) { return explain(by(call, kernel)); });
  define("check_conv2d_int8", "kernel", Kernel{},
         [](Conv2dInt8 const& call, TensorArg const&, Kernel const&) { return has_host_kernel(call); });
  define("conv2d_int8_on_host", "threads", 1, [](Conv2dInt8 const& call, TensorArg const&, int threads) {
    py::gil_scoped_release const released;
    conv2d_int8_on_host(call, threads);
  });
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
