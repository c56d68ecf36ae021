#include <string>
#include <string_view>
#include <vector>

#include "bindings/register.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/device.h"
#include "epiloq/error.h"
#include "epiloq/kernel_archs.h"
#include "epiloq/threads.h"
#include "epiloq/version.h"
#include "interface_hash.h"
#include "source_hash.h"

namespace epiloq::bindings {
namespace {

std::vector<std::string> built_arch_names() {
  std::vector<std::string> names;
  for (Arch arch : built_archs()) names.push_back(name(arch));
  return names;
}

py::dict properties_of(int device_index) {
  DeviceProperties const& properties = device_properties(device_index);
  py::dict result;
  result["compute_capability"] = properties.compute_capability;
  result["sm_count"] = properties.sm_count;
  result["shared_memory_per_block"] = properties.shared_memory_per_block;
  result["memory_gb_s"] = properties.memory_gb_s;
  result["l2_bytes"] = properties.l2_bytes;
  return result;
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (InvalidArgument const& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (Unsupported const& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (CudaError const& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

// Another libepiloq may expect other arguments behind the same names.
void check_library() {
  if (std::string_view(source_hash()) != EPILOQ_SOURCE_HASH)
    throw py::import_error(std::string("libepiloq.so was built from other sources (") + source_hash() +
                           ") than _core (" EPILOQ_SOURCE_HASH ")");
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  check_library();
  module.doc() = "The C++ half of epiloq: checks its arguments, picks a kernel, launches it.";
  module.attr("__version__") = EPILOQ_VERSION;
  module.def("interface_hash", [] { return EPILOQ_INTERFACE_HASH; });
  module.def("source_hash", &source_hash);
  py::register_local_exception_translator(translate);
  module.def("built_archs", &built_arch_names);
  module.def("device_properties", &properties_of, py::arg("device_index"));
  module.def(
      "runs_kernels_of",
      [](std::string const& arch, int device_index) { return runs_kernels_of(parse_arch(arch), device_index); },
      py::arg("arch"), py::arg("device_index"));
  module.def(
      "multiplies_float8", [](int device_index) { return multiplies_float8({Device::Type::kCuda, device_index}); },
      py::arg("device_index"));
  module.def("force_arch", [](std::string const& arch) { force_arch(parse_arch(arch)); }, py::arg("arch"));
  module.def("forced_arch", [] { return name(forced_arch()); });
  module.def("set_batch_invariant", &set_batch_invariant, py::arg("on"));
  module.def("set_batch_invariant_here", &set_batch_invariant_here, py::arg("on"));
  module.def("batch_invariant_here", &batch_invariant_here);
  module.def("batch_invariant", &batch_invariant);
  module.def(
      "use_openmp", [](std::uintptr_t parallel) { use_openmp(reinterpret_cast<OpenMpParallel>(parallel)); },
      py::arg("parallel"));
  register_conv2d_int8(module);
  register_conv2d_weight_only(module);
  register_decode_attention(module);
  register_dequantize_fp4(module);
  register_expert_routing(module);
  register_grouped_packed_mm(module);
  register_fp8_weight_mm(module);
  register_groupwise_mm(module);
  register_host_products(module);
  register_layer_call(module);
  register_layers(module);
  register_lookup_int8(module);
  register_online_quant_mm(module);
  register_packed_layers(module);
  register_quantize_blockwise_int8(module);
  register_quantize_fp8(module);
  register_quantize_int8(module);
  register_rms_norm(module);
  register_rms_norm_quant(module);
  register_scaled_bmm(module);
  register_scaled_mm(module);
  register_silu_and_mul(module);
  register_silu_and_mul_quant(module);
  register_table_mm(module);
  register_torch_state(module);
  register_tuning(module);
  register_w4a8_layer(module);
  register_w4a8_mm(module);
  register_weight_only_mm(module);
}

}  // namespace epiloq::bindings
