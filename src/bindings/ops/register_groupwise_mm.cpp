#include "bindings/register.h"
#include "epiloq/groupwise_mm.h"

namespace epiloq::bindings {

void register_groupwise_mm(py::module_& module) {
  using Optional = std::optional<TensorArg>;
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& a, TensorArg const& b, TensorArg const& scale_a,
                 TensorArg const& scale_b, Optional const& bias, int rows_per_scale, int columns_per_scale,
                 Optional const& offs, Optional const& masked_m, int depth_per_scale, bool constant_b, int threads) {
          return action(
              GroupwiseMm{out.view, a.view, b.view, scale_a.view, scale_b.view, view_of(bias), rows_per_scale,
                          columns_per_scale, depth_per_scale, view_of(offs), view_of(masked_m), constant_b, threads},
              a);
        },
        py::arg("out"), py::arg("a"), py::arg("b"), py::arg("scale_a"), py::arg("scale_b"),
        py::arg("bias") = py::none(), py::arg("rows_per_scale") = 1, py::arg("columns_per_scale") = 128,
        py::arg("offs") = py::none(), py::arg("masked_m") = py::none(), py::arg("depth_per_scale") = 128,
        py::arg("constant_b") = false, py::arg("threads") = 1);
  };
  define("groupwise_mm", [](GroupwiseMm const& call, TensorArg const& a) { groupwise_mm(call, current_stream(a)); });
  define("groupwise_mm_on_host", [](GroupwiseMm const& call, TensorArg const&) {
    py::gil_scoped_release const released;
    groupwise_mm(call);
  });
  define("explain_groupwise_mm", [](GroupwiseMm const& call, TensorArg const&) { return explain(call); });
  define("explain_groupwise_mm_terms", [](GroupwiseMm const& call, TensorArg const&) { return explain(call, true); });
  module.def(
      "explain_groupwise_mm_problem",
      [](std::int64_t m, std::int64_t n, std::int64_t k, bool column_scales, bool aligned, int experts,
         bool per_row_scales, std::string const& dtype, std::string const& arch, int sm_count, bool has_experts,
         bool terms, bool whole_row_scales) {
        GroupwiseMmProblem problem{
            m, n, k, column_scales, aligned, experts, per_row_scales, parse_dtype(dtype), has_experts};
        problem.whole_row_scales = whole_row_scales;
        return explain_groupwise_mm(problem, parse_arch(arch), sm_count, terms);
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("column_scales") = false, py::arg("aligned") = true,
      py::arg("experts") = 1, py::arg("per_row_scales") = false, py::arg("dtype") = "float8_e4m3fn",
      py::arg("arch") = "sm90", py::arg("sm_count") = 0, py::arg("has_experts") = false, py::arg("terms") = false,
      py::arg("whole_row_scales") = false);
}

}  // namespace epiloq::bindings
