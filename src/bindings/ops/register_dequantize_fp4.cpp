#include "bindings/register.h"
#include "epiloq/dequantize_fp4.h"
#include "epiloq/error.h"

namespace epiloq::bindings {
namespace {

WeightFormat fp4_format_of(std::string const& name) {
  if (name == "mxfp4") return WeightFormat::kMxfp4;
  if (name == "nvfp4") return WeightFormat::kNvfp4;
  throw InvalidArgument("epiloq.dequantize_fp4: format: expected mxfp4 or nvfp4, got " + name);
}

}  // namespace

void register_dequantize_fp4(py::module_& module) {
  module.def(
      "dequantize_fp4",
      [](TensorArg const& out, TensorArg const& q, TensorArg const& scale, std::optional<TensorArg> const& global_scale,
         std::optional<TensorArg> const& row_scale, std::string const& format, std::int64_t n, std::int64_t k) {
        PackedWeight weight{.q = q.view, .scale = scale.view, .n = n, .k = k, .format = fp4_format_of(format)};
        weight.group_size = weight.format == WeightFormat::kMxfp4 ? 32 : 16;
        dequantize_fp4({out.view, weight, view_of(global_scale), view_of(row_scale)}, current_stream(out));
      },
      py::arg("out"), py::arg("q"), py::arg("scale"), py::arg("global_scale"), py::arg("row_scale"), py::arg("format"),
      py::arg("n"), py::arg("k"));
}

}  // namespace epiloq::bindings
