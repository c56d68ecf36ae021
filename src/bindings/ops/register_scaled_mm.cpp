#include "bindings/register.h"
#include "epiloq/scaled_mm.h"

namespace epiloq::bindings {
namespace {

using Optional = std::optional<TensorArg>;

ScaledMm call_of(TensorArg const& out, TensorArg const& a, TensorArg const& b, TensorArg const& scale_a,
                 TensorArg const& scale_b, Optional const& bias, Optional const& azp_adj, Optional const& azp,
                 bool fast_accum) {
  return {out.view,      a.view,           b.view,       scale_a.view, scale_b.view,
          view_of(bias), view_of(azp_adj), view_of(azp), fast_accum};
}

}  // namespace

void register_scaled_mm(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& a, TensorArg const& b, TensorArg const& scale_a,
                 TensorArg const& scale_b, Optional const& bias, Optional const& azp_adj, Optional const& azp,
                 bool fast_accum, bool constant_b) {
          ScaledMm call = call_of(out, a, b, scale_a, scale_b, bias, azp_adj, azp, fast_accum);
          call.constant_b = constant_b;
          return action(call, a);
        },
        py::arg("out"), py::arg("a"), py::arg("b"), py::arg("scale_a"), py::arg("scale_b"),
        py::arg("bias") = py::none(), py::arg("azp_adj") = py::none(), py::arg("azp") = py::none(),
        py::arg("fast_accum") = false, py::arg("constant_b") = false);
  };
  define("scaled_mm", [](ScaledMm const& call, TensorArg const& a) { scaled_mm(call, current_stream(a)); });
  module.def(
      "scaled_mm_on_host",
      [](TensorArg const& out, TensorArg const& a, TensorArg const& b, TensorArg const& scale_a,
         TensorArg const& scale_b, Optional const& bias, Optional const& azp_adj, Optional const& azp, int threads) {
        ScaledMm call = call_of(out, a, b, scale_a, scale_b, bias, azp_adj, azp, false);
        call.threads = threads;
        py::gil_scoped_release const released;
        scaled_mm(call);
      },
      py::arg("out"), py::arg("a"), py::arg("b"), py::arg("scale_a"), py::arg("scale_b"), py::arg("bias"),
      py::arg("azp_adj"), py::arg("azp"), py::arg("threads"));
  define("explain_scaled_mm", [](ScaledMm const& call, TensorArg const&) { return explain(call); });
  define("explain_scaled_mm_terms", [](ScaledMm const& call, TensorArg const&) { return explain(call, true); });

  module.def(
      "explain_scaled_mm_problem",
      [](std::int64_t m, std::int64_t n, std::int64_t k, bool aligned, std::string const& dtype, bool fast_accum,
         std::int64_t batches, bool int8_out, std::string const& arch, int sm_count, bool terms) {
        DType const operand = parse_dtype(dtype);
        bool const whole = aligned && k % 16 == 0 && n % 8 == 0;  // as rows of contiguous operands would be
        return explain_scaled_mm({m, n, k, whole, operand, operand, fast_accum, batches, int8_out}, parse_arch(arch),
                                 sm_count, terms);
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("aligned") = true, py::arg("dtype") = "int8",
      py::arg("fast_accum") = false, py::arg("batches") = 1, py::arg("int8_out") = false, py::arg("arch") = "sm90",
      py::arg("sm_count") = 0, py::arg("terms") = false);
  module.def(
      "evaluate_epilogue",
      [](TensorArg const& out, TensorArg const& acc, TensorArg const& scale_a, TensorArg const& scale_b,
         Optional const& bias, Optional const& azp_adj, Optional const& azp) {
        evaluate_epilogue(acc.view, call_of(out, acc, acc, scale_a, scale_b, bias, azp_adj, azp, false));
      },
      py::arg("out"), py::arg("acc"), py::arg("scale_a"), py::arg("scale_b"), py::arg("bias") = py::none(),
      py::arg("azp_adj") = py::none(), py::arg("azp") = py::none());
}

}  // namespace epiloq::bindings
