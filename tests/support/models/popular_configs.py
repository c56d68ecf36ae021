"""What the ``quantization_config`` of much downloaded repositories says, entry by entry, as their tools wrote it."""

from __future__ import annotations

from typing import Any

_GPTQMODEL_2: dict[str, Any] = {
    "damp_auto_increment": 0.0025,
    "damp_percent": 0.01,
    "mse": 0.0,
    "quantizer": ["gptqmodel:2.2.0-dev"],
    "static_groups": False,
    "true_sequential": True,
    "uri": "https://github.com/modelcloud/gptqmodel",
}
_GPTQMODEL_5: dict[str, Any] = {
    **_GPTQMODEL_2,
    "act_group_aware": True,
    "fallback": {"strategy": "rtn", "threshold": "0.5%"},
    "gptaq": None,
    "hessian": {"chunk_size": None},
    "quantizer": ["gptqmodel:5.6.0"],
    "vram_strategy": "exclusive",
}
_GPTQ = {"bits": 4, "desc_act": False, "group_size": 128, "quant_method": "gptq", "sym": True}
_QWEN3_GPTQ = _GPTQ | {
    "checkpoint_format": "gptq",
    "hyb_act": False,
    "lm_head": False,
    "meta": _GPTQMODEL_2,
    "pack_dtype": "int32",
}
_OPTIMUM: dict[str, Any] = {
    "batch_size": 1,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.01,
    "dataset": None,
    "exllama_config": {"version": 1},
    "max_input_length": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
    "use_exllama": True,
}
_AUTO_GPTQ: dict[str, Any] = {
    "damp_percent": 0.1,
    "disable_exllama": False,
    "is_marlin_format": False,
    "model_file_base_name": "model",
    "model_name_or_path": None,
    "static_groups": False,
    "true_sequential": True,
}
_AUTO_ROUND: dict[str, Any] = {
    "act_bits": 16,
    "act_data_type": "float",
    "act_dynamic": True,
    "act_group_size": 128,
    "act_sym": None,
    "amp": True,
    "autoround_version": "0.5.1",
    "batch_size": 8,
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "enable_minmax_tuning": True,
    "enable_norm_bias_tuning": False,
    "enable_quanted_input": True,
    "group_size": 128,
    "iters": 1000,
    "low_gpu_mem_usage": True,
    "nsamples": 512,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "scale_dtype": "torch.float16",
    "seqlen": 2048,
    "super_bits": None,
    "supported_types": ["<class 'torch.nn.modules.linear.Linear'>"],
    "sym": True,
}
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_MINIMAX = {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
_CHANNELS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "memoryless_minmax",
    "observer_kwargs": {},
    "scale_dtype": None,
    "strategy": "channel",
    "symmetric": True,
    "type": "int",
    "zp_dtype": None,
}
_TOKENS = _CHANNELS | {"dynamic": True, "observer": None, "strategy": "token"}
_GROUPS = _CHANNELS | {"actorder": "weight", "group_size": 128, "num_bits": 4, "observer": "mse", "strategy": "group"}


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None, *ignore: str) -> dict[str, Any]:
    group = {"format": layout, "input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group | {"weights": weights}},
        "format": layout,
        "global_compression_ratio": None,
        "ignore": ["lm_head", *ignore],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.3.a20251114",
    }


_FLOAT = {"type": "float"}
_MULTIMODAL = ("re:.*lm_head", "re:vision_tower.*", "re:multi_modal_projector.*")

# By repository: how its layers are packed, and the entry.
REPOSITORIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B-AWQ": (
        "awq",
        {
            "backend": "autoawq",
            "bits": 4,
            "do_fuse": False,
            "exllama_config": None,
            "fuse_max_seq_len": None,
            "group_size": 128,
            "modules_to_fuse": None,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
    ),
    "Qwen3-8B-GPTQ-Int4": ("gptq", _QWEN3_GPTQ),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": ("gptq", _GPTQ | _OPTIMUM),
    "of GPTQModel 5": ("gptq", _QWEN3_GPTQ | {"format": "gptq", "method": "gptq", "meta": _GPTQMODEL_5}),
    "of AutoGPTQ in 2023": ("gptq", _GPTQ | _AUTO_GPTQ),
    "of AutoRound 0.5": ("gptq", _AUTO_ROUND),
    "of AutoRound 0.4": (
        "gptq",
        {key: value for key, value in _AUTO_ROUND.items() if key != "packing_format"}
        | {"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2", "block_name_to_quantize": None},
    ),
    "Qwen3-8B-FP8": ("fp8", _FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]}),
    "DeepSeek-V3.1": ("fp8", _FP8 | {"scale_fmt": "ue8m0"}),
    "MiniMax-M2": ("fp8", _FP8 | _MINIMAX),
    "Llama-3.1-8B-Instruct-quantized.w4a16": ("w4a16", _compressed("pack-quantized", _GROUPS, None)),
    "Mistral-Small-3.2-24B-Instruct-2506-quantized.w4a16": (
        "w4a16",
        _compressed("pack-quantized", _GROUPS, None, *_MULTIMODAL),
    ),
    "Llama-3.1-8B-Instruct-quantized.w8a8": ("int-quantized", _compressed("int-quantized", _CHANNELS, _TOKENS)),
    "Llama-3.3-70B-Instruct-FP8-dynamic": (
        "float-quantized",
        _compressed("float-quantized", _CHANNELS | _FLOAT, _TOKENS | _FLOAT),
    ),
    "Meta-Llama-3.1-8B-Instruct-FP8": (
        "static float-quantized",
        _compressed(
            "float-quantized",
            _CHANNELS | _FLOAT | {"strategy": "tensor"},
            _TOKENS | _FLOAT | {"strategy": "tensor", "dynamic": False},
        ),
    ),
}
# Methods that are refused by name, and what else their configurations say.
REFUSED: dict[str, dict[str, Any]] = {
    "aqlm": {"in_group_size": 8, "nbits_per_codebook": 16, "num_codebooks": 1, "linear_weights_not_to_quantize": []},
    "bitnet": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "eetq": {"weights": "int8"},
    "exl2": {"version": "0.0.11", "bits": 4.0, "head_bits": 6, "calibration": {"rows": 100}},
    "exl3": {"version": "0.0.1", "bits": 4.0},
    "higgs": {"bits": 4, "group_size": 256},
    "hqq": {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
    "quanto": {"weights": "int8"},
    "spqr": {"beta1": 16, "bits": 3},
    "vptq": {"config_for_layers": {}},
}
