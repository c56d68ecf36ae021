#include "bindings/ops/online_quant_scratch.h"
#include "bindings/register.h"
#include "epiloq/error.h"
#include "epiloq/online_quant_mm.h"

namespace epiloq::bindings {
namespace {

using Optional = std::optional<TensorArg>;
using KernelArg = std::optional<std::tuple<std::string, int, int, bool>>;

std::optional<OnlineQuantKernel> kernel_of(KernelArg const& kernel) {
  constexpr std::pair<char const*, OnlineQuantFamily> kFamilies[] = {
      {"sm75", OnlineQuantFamily::kSm75}, {"sm80", OnlineQuantFamily::kSm80}, {"sm90", OnlineQuantFamily::kSm90}};
  if (!kernel) return std::nullopt;
  auto const& [name, row, split, last_wave] = *kernel;
  for (auto const& [known, family] : kFamilies) {
    if (name == known) return OnlineQuantKernel{family, row, split, last_wave};
  }
  throw InvalidArgument("epiloq.online_quant_mm: kernel: expected sm75, sm80 or sm90, got " + name);
}

}  // namespace

void register_online_quant_mm(py::module_& module) {
  auto const define = [&module](char const* name, auto action, auto const&... more) {
    module.def(name, action, py::arg("out"), py::arg("x"), py::arg("values"), py::arg("parameters"), py::arg("bias"),
               py::arg("in_features"), py::arg("group_size"), py::arg("bits"), py::arg("lo"), py::arg("hi"),
               py::arg("staged"), more...);
  };
  define(
      "online_quant_mm",
      [](TensorArg const& out, TensorArg const& x, TensorArg const& values, TensorArg const& parameters,
         Optional const& bias, std::int64_t in_features, std::int64_t group_size, int bits, float lo, float hi,
         bool staged, Optional const& products, Optional const& sums, KernelArg const& kernel) {
        OnlineQuantMm const call{
            out.view, x.view, values.view, parameters.view,  view_of(bias), in_features, group_size, bits, lo,
            hi,       staged, 1,           kernel_of(kernel)};
        OnlineQuantScratch const scratch(x, call);
        OnlineQuantWorkspace workspace = scratch.workspace();
        workspace.products = view_of(products), workspace.sums = view_of(sums);
        online_quant_mm(call, workspace, current_stream(x));
      },
      py::arg("products") = py::none(), py::arg("sums") = py::none(), py::arg("kernel") = py::none());
  define(
      "online_quant_mm_on_host",
      [](TensorArg const& out, TensorArg const& x, TensorArg const& values, TensorArg const& parameters,
         Optional const& bias, std::int64_t in_features, std::int64_t group_size, int bits, float lo, float hi,
         bool staged, int threads) {
        py::gil_scoped_release const released;
        online_quant_mm({out.view, x.view, values.view, parameters.view, view_of(bias), in_features, group_size, bits,
                         lo, hi, staged, threads});
      },
      py::arg("threads"));
  define(
      "explain_online_quant_mm",
      [](TensorArg const& out, TensorArg const& x, TensorArg const& values, TensorArg const& parameters,
         Optional const& bias, std::int64_t in_features, std::int64_t group_size, int bits, float lo, float hi,
         bool staged, KernelArg const& kernel, bool terms) {
        OnlineQuantMm const call{
            out.view, x.view, values.view, parameters.view,  view_of(bias), in_features, group_size, bits, lo,
            hi,       staged, 1,           kernel_of(kernel)};
        return explain(call, terms);
      },
      py::arg("kernel") = py::none(), py::arg("terms") = false);
  module.def("online_quant_mm_needs_staging", &needs_staging, py::arg("group_size"));
  module.def(
      "explain_online_quant_mm_problem",
      [](std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t group_size, int bits, std::string const& arch,
         int sm_count, int memory_gb_s, bool terms) {
        return explain_online_quant_mm({m, n, k, group_size, bits}, parse_arch(arch), sm_count, memory_gb_s, terms);
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("group_size") = 128, py::arg("bits") = 8,
      py::arg("arch") = "sm90", py::arg("sm_count") = 0, py::arg("memory_gb_s") = 0, py::arg("terms") = false);
}

}  // namespace epiloq::bindings
