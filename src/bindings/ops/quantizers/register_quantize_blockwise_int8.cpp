#include "bindings/register.h"
#include "epiloq/quantize_blockwise_int8.h"

namespace epiloq::bindings {

void register_quantize_blockwise_int8(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& q, TensorArg const& x, TensorArg const& scale, std::optional<TensorArg> const& offset,
                 TensorArg const& sum, std::int64_t group_size) {
          action(QuantizeBlockwiseInt8{q.view, x.view, scale.view, view_of(offset), sum.view, group_size}, x);
        },
        py::arg("q"), py::arg("x"), py::arg("scale"), py::arg("offset"), py::arg("sum"), py::arg("group_size"));
  };
  define("quantize_blockwise_int8", [](QuantizeBlockwiseInt8 const& call, TensorArg const& x) {
    quantize_blockwise_int8(call, current_stream(x));
  });
  define("check_quantize_blockwise_int8", [](QuantizeBlockwiseInt8 const& call, TensorArg const&) { check(call); });
}

}  // namespace epiloq::bindings
