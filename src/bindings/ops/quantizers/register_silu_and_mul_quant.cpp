#include "bindings/granularity.h"
#include "bindings/register.h"
#include "bindings/torch_state.h"
#include "epiloq/silu_and_mul_quant.h"

namespace epiloq::bindings {

void register_silu_and_mul_quant(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& q, TensorArg const& x, TensorArg const& scale, std::string const& granularity,
                 int group_size, bool ue8m0, float alpha, float limit, float offset) {
          return action(SiluAndMulQuant{q.view,
                                        x.view,
                                        scale.view,
                                        parse_granularity("silu_and_mul_quant", granularity),
                                        group_size,
                                        ue8m0,
                                        {alpha, limit, offset}},
                        x);
        },
        py::arg("q"), py::arg("x"), py::arg("scale"), py::arg("granularity"), py::arg("group_size"), py::arg("ue8m0"),
        py::arg("alpha"), py::arg("limit"), py::arg("offset"));
  };
  define("silu_and_mul_quant", [](auto const& call, TensorArg const& x) {
    run_with_threads(call, x, [](auto const& given, Stream stream) { silu_and_mul_quant(given, stream); });
  });
  define("explain_silu_and_mul_quant", [](SiluAndMulQuant const& call, TensorArg const&) { return explain(call); });
}

}  // namespace epiloq::bindings
