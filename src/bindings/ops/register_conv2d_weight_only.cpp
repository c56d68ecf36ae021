#include "bindings/geometry.h"
#include "bindings/register.h"
#include "epiloq/conv2d_weight_only.h"
#include "epiloq/error.h"

namespace epiloq::bindings {
namespace {

using KernelArg = std::tuple<std::string, int, int>;

Conv2dWeightOnlyKernel kernel_of(KernelArg const& kernel) {
  auto const& [name, row, split] = kernel;
  if (name == "patches") return {Conv2dWeightOnlyFamily::kPatches, row, split};
  if (name == "wgmma") return {Conv2dWeightOnlyFamily::kWgmma, row, split};
  throw InvalidArgument("epiloq.conv2d_weight_only: kernel: expected patches or wgmma, got " + name);
}

}  // namespace

void register_conv2d_weight_only(py::module_& module) {
  using Optional = std::optional<TensorArg>;
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, TensorArg const& q, TensorArg const& scale,
                 Optional const& zero, Optional const& offset, Optional const& bias, int bits, std::int64_t n,
                 Pair const& kernel, std::int64_t channels, std::int64_t padded_channels, std::int64_t group_size,
                 bool depthwise, float lo, float hi, Pair const& stride, Sides const& padding, Pair const& dilation,
                 std::int64_t groups, int threads, std::optional<KernelArg> const& forced) {
          std::int64_t const columns = kernel[0] * kernel[1] * padded_channels;
          PackedWeight const rows{q.view, scale.view, view_of(zero), view_of(offset), bits, n, columns, group_size};
          PackedConv2dWeight const weight{rows, depthwise, kernel[0], kernel[1], channels, padded_channels};
          Conv2dWeightOnly call{out.view, x.view, weight, view_of(bias), lo, hi, {stride, padding, dilation, groups},
                                threads};
          if (forced) call.kernel = kernel_of(*forced);
          return action(call, x);
        },
        py::arg("out"), py::arg("x"), py::arg("q"), py::arg("scale"), py::arg("zero"), py::arg("offset"),
        py::arg("bias"), py::arg("bits"), py::arg("n"), py::arg("kernel"), py::arg("channels"),
        py::arg("padded_channels"), py::arg("group_size"), py::arg("depthwise"), py::arg("lo"), py::arg("hi"),
        py::arg("stride"), py::arg("padding"), py::arg("dilation"), py::arg("groups"), py::arg("threads") = 1,
        py::arg("forced") = py::none());
  };
  define("conv2d_weight_only", [](Conv2dWeightOnly const& call, TensorArg const& x) {
    Stream const stream = current_stream(x);
    std::optional<py::gil_scoped_release> released;
    if (x.view.device.type == Device::Type::kCpu) released.emplace();
    return conv2d_weight_only(call, stream);
  });
  define("explain_conv2d_weight_only", [](Conv2dWeightOnly const& call, TensorArg const&) { return explain(call); });
}

}  // namespace epiloq::bindings
