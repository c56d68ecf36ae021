#include "bindings/geometry.h"
#include "bindings/register.h"
#include "epiloq/conv2d_int8.h"

namespace epiloq::bindings {

void register_conv2d_int8(py::module_& module) {
  using Optional = std::optional<TensorArg>;
  using Range = std::pair<std::int64_t, std::int64_t>;
  // `last`: the name of the last argument, two numbers that `action` gets as they are.
  auto const define = [&module](char const* name, char const* last, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, TensorArg const& weight, TensorArg const& scale,
                 Optional const& bias, Optional const& correction, int input_zero, int output_zero, float lo, float hi,
                 Pair const& stride, Sides const& padding, Pair const& dilation, std::int64_t groups,
                 std::optional<Range> const& numbers) {
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
          return action(call, x, numbers);
        },
        py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("scale"), py::arg("bias"), py::arg("correction"),
        py::arg("input_zero"), py::arg("output_zero"), py::arg("lo"), py::arg("hi"), py::arg("stride"),
        py::arg("padding"), py::arg("dilation"), py::arg("groups"), py::arg(last) = py::none());
  };
  auto const by = [](Conv2dInt8 call, std::optional<Range> const& kernel) {
    if (kernel) call.kernel = {static_cast<int>(kernel->first), static_cast<int>(kernel->second)};
    return call;
  };
  define("conv2d_int8", "kernel", [by](Conv2dInt8 const& call, TensorArg const& x, std::optional<Range> const& kernel) {
    conv2d_int8(by(call, kernel), current_stream(x));
  });
  define("explain_conv2d_int8", "kernel",
         [by](Conv2dInt8 const& call, TensorArg const&, std::optional<Range> const& kernel) {
           return explain(by(call, kernel));
         });
  define("check_conv2d_int8", "kernel",
         [](Conv2dInt8 const& call, TensorArg const&, std::optional<Range> const&) { return has_host_kernel(call); });
  define("conv2d_int8_rows", "rows", [](Conv2dInt8 const& call, TensorArg const&, std::optional<Range> const& rows) {
    py::gil_scoped_release const released;
    auto const [first, last] = rows.value_or(Range{0, call.out.size(0) * call.out.size(1)});
    conv2d_int8_rows(call, first, last);
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
