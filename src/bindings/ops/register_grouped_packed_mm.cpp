#include "bindings/register.h"
#include "epiloq/error.h"
#include "epiloq/grouped_packed_mm.h"
#include "epiloq/tuning.h"

namespace epiloq::bindings {
namespace {

using Optional = std::optional<TensorArg>;

WeightFormat format_of(std::string const& name) {
  constexpr std::pair<char const*, WeightFormat> kFormats[] = {
      {"int", WeightFormat::kInteger}, {"mxfp4", WeightFormat::kMxfp4}, {"nvfp4", WeightFormat::kNvfp4}};
  for (auto const& [known, format] : kFormats) {
    if (name == known) return format;
  }
  throw InvalidArgument("epiloq.grouped_packed_mm: format: expected int, mxfp4 or nvfp4, got " + name);
}

}  // namespace

void register_grouped_packed_mm(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, TensorArg const& q, TensorArg const& scale,
                 Optional const& zero, Optional const& offset, Optional const& bias, Optional const& factor,
                 Optional const& counts, bool masked, std::string const& format, int bits, std::int64_t n,
                 std::int64_t k, std::int64_t group_size, std::optional<std::pair<int, int>> const& kernel,
                 int threads) {
          PackedWeight weight{q.view, scale.view, view_of(zero), view_of(offset), bits, n, k, group_size};
          weight.format = format_of(format);
          GroupedPackedMm call{out.view, x.view, weight, view_of(counts), masked, view_of(bias), view_of(factor)};
          if (kernel) call.kernel = {kernel->first, kernel->second};
          call.threads = threads;
          return action(call, x);
        },
        py::arg("out"), py::arg("x"), py::arg("q"), py::arg("scale"), py::arg("zero"), py::arg("offset"),
        py::arg("bias"), py::arg("factor"), py::arg("counts"), py::arg("masked"), py::arg("format"), py::arg("bits"),
        py::arg("n"), py::arg("k"), py::arg("group_size"), py::arg("kernel") = py::none(), py::arg("threads") = 1);
  };
  define("grouped_packed_mm", [](GroupedPackedMm const& call, TensorArg const& x) {
    Stream const stream = current_stream(x);
    std::optional<py::gil_scoped_release> released;
    if (x.view.device.type == Device::Type::kCpu) released.emplace();
    return grouped_packed_mm(call, stream);
  });
  define("explain_grouped_packed_mm", [](GroupedPackedMm const& call, TensorArg const&) { return explain(call); });
  // The arguments of `action` are the problem, its architecture, and those that follow.
  auto const define_problem = [&module](char const* name, auto action, auto const&... more) {
    module.def(name, action, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("experts") = py::none(),
               py::arg("masked") = false, py::arg("format") = "int", py::arg("bits") = 4, py::arg("group_size") = 128,
               py::arg("dtype") = "bfloat16", py::arg("arch") = "sm90", more...);
  };
  define_problem(
      "explain_grouped_packed_mm_problem",
      [](std::int64_t m, std::int64_t n, std::int64_t k, std::optional<int> experts, bool masked,
         std::string const& format, int bits, std::int64_t group_size, std::string const& dtype,
         std::string const& arch, int sm_count) {
        return explain_grouped_packed_mm(
            {m, n, k, experts, masked, format_of(format), bits, group_size, parse_dtype(dtype)}, parse_arch(arch),
            sm_count);
      },
      py::arg("sm_count") = 0);
  define_problem(
      "has_expert_wgmma",
      [](std::int64_t m, std::int64_t n, std::int64_t k, std::optional<int> experts, bool masked,
         std::string const& format, int bits, std::int64_t group_size, std::string const& dtype,
         std::string const& arch, bool same_type, bool has_gaps, int device) {
        return has_expert_wgmma(
            {m, n, k, experts, masked, format_of(format), bits, group_size, parse_dtype(dtype), same_type, has_gaps},
            parse_arch(arch), device);
      },
      py::arg("same_type") = true, py::arg("has_gaps") = false, py::arg("device") = kNoDevice);
}

}  // namespace epiloq::bindings
