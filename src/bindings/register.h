#pragma once

#include "bindings/dlpack.h"

namespace epiloq::bindings {

void register_conv2d_int8(py::module_& module);
void register_conv2d_weight_only(py::module_& module);
void register_decode_attention(py::module_& module);
void register_dequantize_fp4(py::module_& module);
void register_expert_routing(py::module_& module);
void register_grouped_packed_mm(py::module_& module);
void register_fp8_weight_mm(py::module_& module);
void register_groupwise_mm(py::module_& module);
void register_host_products(py::module_& module);
void register_layer_call(py::module_& module);
void register_layers(py::module_& module);
void register_lookup_int8(py::module_& module);
void register_online_quant_mm(py::module_& module);
void register_packed_layers(py::module_& module);
void register_quantize_blockwise_int8(py::module_& module);
void register_quantize_fp8(py::module_& module);
void register_quantize_int8(py::module_& module);
void register_rms_norm(py::module_& module);
void register_rms_norm_quant(py::module_& module);
void register_scaled_bmm(py::module_& module);
void register_scaled_mm(py::module_& module);
void register_silu_and_mul(py::module_& module);
void register_silu_and_mul_quant(py::module_& module);
void register_table_mm(py::module_& module);
void register_torch_state(py::module_& module);
void register_tuning(py::module_& module);
void register_w4a8_layer(py::module_& module);
void register_w4a8_mm(py::module_& module);
void register_weight_only_mm(py::module_& module);

}  // namespace epiloq::bindings
