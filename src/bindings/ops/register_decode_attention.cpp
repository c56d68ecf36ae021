#include "bindings/register.h"
#include "epiloq/decode_attention.h"

namespace epiloq::bindings {

void register_decode_attention(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& query, TensorArg const& key, TensorArg const& value,
                 std::optional<TensorArg> const& mask, std::optional<TensorArg> const& key_scale,
                 std::optional<TensorArg> const& value_scale, float scale, std::optional<TensorArg> const& sinks,
                 std::optional<TensorArg> const& workspace) {
          DecodeAttention const call{
              out.view,           query.view,           key.view, value.view,         view_of(mask),
              view_of(key_scale), view_of(value_scale), scale,    view_of(workspace), view_of(sinks)};
          return action(call, query);
        },
        py::arg("out"), py::arg("query"), py::arg("key"), py::arg("value"), py::arg("mask"), py::arg("key_scale"),
        py::arg("value_scale"), py::arg("scale"), py::arg("sinks") = py::none(), py::arg("workspace") = py::none());
  };
  module.def(
      "decode_attention_workspace",
      [](std::int64_t batches, std::int64_t heads, std::int64_t key_heads, std::int64_t tokens, std::int64_t width,
         int device) { return decode_attention_workspace({batches, heads, key_heads, tokens, width}, device); },
      py::arg("batches"), py::arg("heads"), py::arg("key_heads"), py::arg("tokens"), py::arg("width"),
      py::arg("device"));
  define("decode_attention", [](DecodeAttention const& call, TensorArg const& query) {
    return decode_attention(call, current_stream(query));
  });
  auto const define_rotation = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& query, TensorArg const& heads, TensorArg const& cos, TensorArg const& sin,
                 TensorArg const& key_cache, TensorArg const& value_cache, std::optional<TensorArg> const& position,
                 std::optional<TensorArg> const& query_norm, std::optional<TensorArg> const& key_norm, float epsilon,
                 std::optional<TensorArg> const& key_scale, std::optional<TensorArg> const& value_scale) {
          RotateAndStore const call{query.view,        heads.view,       cos.view,           sin.view,
                                    key_cache.view,    value_cache.view, view_of(position),  view_of(query_norm),
                                    view_of(key_norm), epsilon,          view_of(key_scale), view_of(value_scale)};
          action(call, heads);
        },
        py::arg("query"), py::arg("heads"), py::arg("cos"), py::arg("sin"), py::arg("key_cache"),
        py::arg("value_cache"), py::arg("position"), py::arg("query_norm") = py::none(),
        py::arg("key_norm") = py::none(), py::arg("epsilon") = 0.f, py::arg("key_scale") = py::none(),
        py::arg("value_scale") = py::none());
  };
  define_rotation("rotate_and_store", [](RotateAndStore const& call, TensorArg const& heads) {
    rotate_and_store(call, current_stream(heads));
  });
  define_rotation("check_rotate_and_store", [](RotateAndStore const& call, TensorArg const&) { check(call); });
  define("check_decode_attention", [](DecodeAttention const& call, TensorArg const&) { check(call); });
}

}  // namespace epiloq::bindings
