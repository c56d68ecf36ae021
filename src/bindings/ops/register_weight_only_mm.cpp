#include "bindings/register.h"
#include "epiloq/error.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::bindings {
namespace {

using Optional = std::optional<TensorArg>;

PackedWeight weight_of(TensorArg const& q, TensorArg const& scale, Optional const& zero, Optional const& offset,
                       int bits, std::int64_t n, std::int64_t k, std::int64_t group_size) {
  return {q.view, scale.view, view_of(zero), view_of(offset), bits, n, k, group_size};
}

using KernelArg = std::tuple<std::string, int, int>;

constexpr std::pair<char const*, WeightOnlyMmFamily> kFamilies[] = {{"gemv", WeightOnlyMmFamily::kGemv},
                                                                    {"tiled", WeightOnlyMmFamily::kTiled},
                                                                    {"decode", WeightOnlyMmFamily::kDecode},
                                                                    {"wgmma", WeightOnlyMmFamily::kWgmma}};

char const* name_of(WeightOnlyMmFamily family) {
  for (auto const& [name, known] : kFamilies) {
    if (family == known) return name;
  }
  return "dense";
}

WeightOnlyMmKernel kernel_of(KernelArg const& kernel) {
  auto const& [name, row, split] = kernel;
  for (auto const& [known, family] : kFamilies) {
    if (name == known) return {family, row, split};
  }
  throw InvalidArgument("epiloq.weight_only_mm: kernel: expected gemv, tiled, decode or wgmma, got " + name);
}

}  // namespace

void register_weight_only_mm(py::module_& module) {
  auto const define = [&module](char const* name, auto action) {
    module.def(
        name,
        [action](TensorArg const& out, TensorArg const& x, TensorArg const& q, TensorArg const& scale,
                 Optional const& zero, Optional const& offset, Optional const& bias, int bits, std::int64_t n,
                 std::int64_t k, std::int64_t group_size, float lo, float hi, std::optional<KernelArg> const& kernel,
                 int threads) {
          PackedWeight const weight = weight_of(q, scale, zero, offset, bits, n, k, group_size);
          WeightOnlyMm call{out.view, x.view, weight, view_of(bias), lo, hi};
          call.threads = threads;
          if (kernel) call.kernel = kernel_of(*kernel);
          return action(call, x);
        },
        py::arg("out"), py::arg("x"), py::arg("q"), py::arg("scale"), py::arg("zero"), py::arg("offset"),
        py::arg("bias"), py::arg("bits"), py::arg("n"), py::arg("k"), py::arg("group_size"), py::arg("lo"),
        py::arg("hi"), py::arg("kernel") = py::none(), py::arg("threads") = 1);
  };
  define("weight_only_mm", [](WeightOnlyMm const& call, TensorArg const& x) {
    Stream const stream = current_stream(x);
    std::optional<py::gil_scoped_release> released;
    if (x.view.device.type == Device::Type::kCpu) released.emplace();
    return weight_only_mm(call, stream);
  });
  define("explain_weight_only_mm", [](WeightOnlyMm const& call, TensorArg const&) { return explain(call); });
  define("explain_weight_only_mm_terms",
         [](WeightOnlyMm const& call, TensorArg const&) { return explain(call, true); });

  module.def(
      "dequantize_weight",
      [](TensorArg const& out, TensorArg const& q, TensorArg const& scale, Optional const& zero, Optional const& offset,
         int bits, std::int64_t n, std::int64_t k, std::int64_t group_size) {
        PackedWeight const weight = weight_of(q, scale, zero, offset, bits, n, k, group_size);
        dequantize_weight({out.view, weight}, current_stream(out));
      },
      py::arg("out"), py::arg("q"), py::arg("scale"), py::arg("zero"), py::arg("offset"), py::arg("bits"), py::arg("n"),
      py::arg("k"), py::arg("group_size"));
  module.def(
      "explain_weight_only_mm_problem",
      [](std::int64_t m, std::int64_t n, std::int64_t k, int bits, std::int64_t group_size, std::string const& arch,
         int sm_count, int memory_gb_s, bool terms) {
        WeightOnlyMmProblem problem;
        problem.m = m;
        problem.n = n;
        problem.k = k;
        problem.bits = bits;
        problem.group_size = group_size;
        return explain_weight_only_mm(problem, parse_arch(arch), sm_count, memory_gb_s, terms);
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("bits") = 4, py::arg("group_size") = 128,
      py::arg("arch") = "sm90", py::arg("sm_count") = 0, py::arg("memory_gb_s") = 0, py::arg("terms") = false);
  module.def("weight_only_mm_costs", &weight_only_mm_costs);
  module.def(
      "expected_weight_only_mm",
      [](std::int64_t m, std::int64_t n, std::int64_t k, int bits, int memory_gb_s, std::vector<double> const& costs) {
        std::vector<std::pair<KernelArg, double>> all;
        for (auto const& [kernel, us] : expected_weight_only_mm({m, n, k, bits}, memory_gb_s, costs)) {
          all.push_back({{name_of(kernel.family), kernel.row, kernel.split}, us});
        }
        return all;
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("bits"), py::arg("memory_gb_s"), py::arg("costs"));
}

}  // namespace epiloq::bindings
