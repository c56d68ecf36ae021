#include "bindings/register.h"
#include "epiloq/error.h"
#include "epiloq/grouped_weight_only_mm.h"

namespace epiloq::bindings {
namespace {

using Optional = std::optional<TensorArg>;

WeightFormat format_of(std::string const& name) {
  constexpr std::pair<char const*, WeightFormat> kFormats[] = {
      {"int", WeightFormat::kInteger}, {"mxfp4", WeightFormat::kMxfp4}, {"nvfp4", WeightFormat::kNvfp4}};
  for (auto const& [known, format] : kFormats) {
    if (name == known) return format;
  }
  throw InvalidArgument("epiloq.grouped_weight_only_mm: format: expected int, mxfp4 or nvfp4, got " + name);
}

}  // namespace

void register_grouped_weight_only_mm(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, TensorArg const& q, TensorArg const& scale,
                 Optional const& zero, Optional const& offset, Optional const& bias, Optional const& factor,
                 Optional const& counts, bool masked, std::string const& format, int bits, std::int64_t n,
                 std::int64_t k, std::int64_t group_size, std::optional<std::pair<int, int>> const& kernel) {
          PackedWeight weight{q.view, scale.view, view_of(zero), view_of(offset), bits, n, k, group_size};
          weight.format = format_of(format);
          GroupedWeightOnlyMm call{out.view, x.view, weight, view_of(counts), masked, view_of(bias), view_of(factor)};
          if (kernel) call.kernel = {kernel->first, kernel->second};
          return action(call, x);
        },
        py::arg("out"), py::arg("x"), py::arg("q"), py::arg("scale"), py::arg("zero"), py::arg("offset"),
        py::arg("bias"), py::arg("factor"), py::arg("counts"), py::arg("masked"), py::arg("format"), py::arg("bits"),
        py::arg("n"), py::arg("k"), py::arg("group_size"), py::arg("kernel") = py::none());
  };
  define("grouped_weight_only_mm", [](GroupedWeightOnlyMm const& call, TensorArg const& x) {
    return grouped_weight_only_mm(call, current_stream(x));
  });
  define("explain_grouped_weight_only_mm",
         [](GroupedWeightOnlyMm const& call, TensorArg const&) { return explain(call); });
}

}  // namespace epiloq::bindings
