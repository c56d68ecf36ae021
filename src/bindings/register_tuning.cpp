#include <utility>

#include "bindings/register.h"
#include "epiloq/groupwise_mm.h"
#include "epiloq/online_quant_mm.h"
#include "epiloq/scaled_mm.h"
#include "epiloq/tuning.h"
#include "epiloq/w4a8_mm.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::bindings {
namespace {

// (key, what dispatch chooses by itself, [(candidate, expected microseconds)])
using Answer = std::tuple<std::string, std::string, std::vector<std::pair<std::string, double>>>;

template <class Problem>
Answer answer(Problem const& problem, int device) {
  KernelCandidates const found = candidates(problem, device);
  Answer result{found.key, found.chosen, {}};
  for (auto const& [name, us] : found.all) std::get<2>(result).emplace_back(name, us);
  return result;
}

// Held forever: dispatch may ask while the interpreter shuts down.
void call_on_first_dispatch(py::function const& load) {
  auto* const held = new py::function(load);
  on_first_dispatch([held](int device) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire const acquired;
    (*held)(device);
  });
}

}  // namespace

void register_tuning(py::module_& module) {
  module.def("kernel_hash", &kernel_hash);
  module.def("force_kernel", &force_kernel, py::arg("name"));
  module.def("set_tuned_kernel", &set_tuned_kernel, py::arg("device"), py::arg("key"), py::arg("name"));
  module.def("clear_tuned_kernels", &clear_tuned_kernels, py::arg("device"));
  module.def("on_first_dispatch", &call_on_first_dispatch, py::arg("load"));
  module.def(
      "candidates_scaled_mm",
      [](int device, std::int64_t m, std::int64_t n, std::int64_t k, std::string const& dtype, bool fast_accum) {
        DType const operand = parse_dtype(dtype);
        return answer(ScaledMmProblem{m, n, k, k % 16 == 0 && n % 8 == 0, operand, operand, fast_accum}, device);
      },
      py::arg("device"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("dtype") = "int8",
      py::arg("fast_accum") = false);
  module.def(
      "candidates_groupwise_mm",
      [](int device, std::int64_t m, std::int64_t n, std::int64_t k, bool column_scales, bool whole_row_scales) {
        return answer(GroupwiseMmProblem{.m = m,
                                         .n = n,
                                         .k = k,
                                         .column_scales = column_scales,
                                         .aligned = k % 16 == 0,
                                         .whole_row_scales = whole_row_scales},
                      device);
      },
      py::arg("device"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("column_scales") = false,
      py::arg("whole_row_scales") = false);
  module.def(
      "candidates_online_quant_mm",
      [](int device, std::int64_t m, std::int64_t n, std::int64_t k, int bits, std::int64_t group_size) {
        return answer(OnlineQuantProblem{m, n, k, group_size, bits}, device);
      },
      py::arg("device"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("bits") = 8, py::arg("group_size") = 128);
  module.def(
      "candidates_w4a8_mm",
      [](int device, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t group_size) {
        return answer(W4a8Problem{m, n, k, group_size}, device);
      },
      py::arg("device"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("group_size") = 128);
  module.def(
      "candidates_weight_only_mm",
      [](int device, std::int64_t m, std::int64_t n, std::int64_t k, int bits, std::int64_t group_size,
         std::string const& dtype, int scale_bytes, bool zeros, bool offsets, bool same_type) {
        WeightOnlyMmProblem problem{m, n, k, bits, group_size, parse_dtype(dtype)};
        problem.scale_bytes = scale_bytes;
        problem.zero_bytes = zeros ? 1 : 0;
        problem.offsets = offsets;
        problem.same_type = same_type;
        return answer(problem, device);
      },
      py::arg("device"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("bits") = 4, py::arg("group_size") = 128,
      py::arg("dtype") = "bfloat16", py::arg("scale_bytes") = 2, py::arg("zeros") = false, py::arg("offsets") = false,
      py::arg("same_type") = true);
}

}  // namespace epiloq::bindings
