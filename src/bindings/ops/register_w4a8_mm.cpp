#include "bindings/register.h"
#include "epiloq/w4a8_mm.h"

namespace epiloq::bindings {

void register_w4a8_mm(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x_q, TensorArg const& scale_a, TensorArg const& q,
                 TensorArg const& scale, std::optional<TensorArg> const& zero, TensorArg const& scratch,
                 std::optional<TensorArg> const& bias, std::int64_t n, std::int64_t k, std::int64_t group_size) {
          PackedWeight const weight{q.view, scale.view, view_of(zero), std::nullopt, 4, n, k, group_size};
          return action(W4a8Mm{out.view, x_q.view, scale_a.view, weight, scratch.view, view_of(bias)}, x_q);
        },
        py::arg("out"), py::arg("x_q"), py::arg("scale_a"), py::arg("q"), py::arg("scale"), py::arg("zero"),
        py::arg("scratch"), py::arg("bias"), py::arg("n"), py::arg("k"), py::arg("group_size"));
  };
  define("w4a8_mm", [](W4a8Mm const& call, TensorArg const& x_q) { return w4a8_mm(call, current_stream(x_q)); });
  module.def(
      "widen_tokens",
      [](TensorArg const& out, TensorArg const& x_q, TensorArg const& scale_a) {
        widen_tokens({out.view, x_q.view, scale_a.view}, current_stream(x_q));
      },
      py::arg("out"), py::arg("x_q"), py::arg("scale_a"));
  define("explain_w4a8_mm", [](W4a8Mm const& call, TensorArg const&) { return explain(call); });
  define("explain_w4a8_mm_terms", [](W4a8Mm const& call, TensorArg const&) { return explain(call, true); });
  module.def(
      "explain_w4a8_mm_problem",
      [](std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t group_size, std::string const& arch, int sm_count,
         bool terms) { return explain_w4a8_mm({m, n, k, group_size}, parse_arch(arch), sm_count, terms); },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("group_size") = 128, py::arg("arch") = "sm90",
      py::arg("sm_count") = 0, py::arg("terms") = false);
}

}  // namespace epiloq::bindings
