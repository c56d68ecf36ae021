"""Rarer directories of other tools: layers that differ, other blocks, scales of a tensor, activations as they are."""

from __future__ import annotations

from typing import Any

import torch

from foreign_layers import Pack, awq, by_name, fp8, gptq, integers, mxfp8, mxfp8_of_compressed_tensors, packed


def ct_group(targets: list[str], weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> Any:
    return {"targets": targets, "weights": weights, "input_activations": inputs, "output_activations": None, **more}


def ct(layout: str, *groups: Any, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "version": "0.12.2",
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["re:.*lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        **more,
    }


def args(bits: int = 8, strategy: str = "channel", kind: str = "int", symmetric: bool = True, **more: Any) -> Any:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False, **more}


INT4 = args(4, "group", group_size=32)
TOKENS = args(8, "token") | {"dynamic": True}
FP8_TOKENS = args(8, "token", "float") | {"dynamic": True}
TENSOR = args(8, "tensor")
FP8_GROUPS = args(8, "group", "float", group_size=32)
MXFP8 = FP8_GROUPS | {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
FP8, FP8_TENSOR = args(kind="float"), args(strategy="tensor", kind="float")
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_GPTQMODEL_AWQ = {
    "quant_method": "awq",
    "method": "awq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "lm_head": False,
    "zero_point": True,
    "version": "gemm",
    "checkpoint_format": "gemm",
    "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:5.0.0"], "damp_percent": 0.05},
}
_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
    "act_bits": 16,
    "iters": 200,
    "autoround_version": "0.9.2",
    "block_name_to_quantize": "model.layers",
    "packing_format": "auto_round:auto_gptq",
}
_FORMER_ROUND = {key: value for key, value in _ROUND.items() if key != "packing_format"} | {"sym": False}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

VARIANTS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "groups by expression, name and class": (
        by_name(
            ("q_proj", packed(8, -1, True)),
            ("layers.0.mlp.down_proj", packed(4, 16, True)),
            ("layers.1.mlp.gate_proj", None),
            ("", packed(4, 32, True)),
        ),
        ct(
            "pack-quantized",
            ct_group(["re:.*q_proj$"], args()),
            ct_group(["model.layers.0.mlp.down_proj"], {**INT4, "group_size": 16}),
            ct_group(["Linear"], INT4),
            ignore=["lm_head", "model.layers.1.mlp.gate_proj"],
        ),
    ),
    "layouts that differ": (
        by_name(("mlp", integers("channel")), ("", packed(4, 32, True))),
        ct(
            "mixed-precision",
            ct_group(["re:.*mlp.*"], args(), TOKENS, format="int-quantized"),
            ct_group(["re:.*self_attn.*"], INT4, format="pack-quantized"),
        ),
    ),
    "weight_g_idx": (packed(4, 32, True, order=True), ct("pack-quantized", ct_group(["Linear"], INT4))),
    "zero points of a symmetric group": (
        packed(4, 32, True, zeros=True),
        ct("pack-quantized", ct_group(["Linear"], INT4)),
    ),
    "int8 per tensor": (integers("tensor"), ct("int-quantized", ct_group(["Linear"], TENSOR, TOKENS))),
    "int8 per tensor, static": (
        integers("tensor", static=True),
        ct("int-quantized", ct_group(["Linear"], TENSOR, TENSOR)),
    ),
    "int8 weights alone": (
        integers("channel"),
        ct("int-quantized", ct_group(["Linear"], args(), format="int-quantized")),
    ),
    "asymmetric int8 weights alone": (
        integers("group", symmetric=False),
        ct("naive-quantized", ct_group(["Linear"], args(8, "group", symmetric=False, group_size=32)))
        | {"format": "int-quantized"},
    ),
    "int4 with fp8, as vLLM reads it": (
        packed(4, 32, True),
        ct("pack-quantized", ct_group(["Linear"], INT4, FP8_TOKENS)),
    ),
    "int4 with fp8, asymmetric": (
        packed(4, 32, False),
        ct("pack-quantized", ct_group(["Linear"], INT4 | {"symmetric": False}, FP8_TOKENS)),
    ),
    "int4 per channel with fp8": (
        integers("channel", bits=4),
        ct("int-quantized", ct_group(["Linear"], args(4), FP8_TOKENS)),
    ),
    "int4 with int8, as vLLM reads it": (
        integers("group", bits=4),
        ct("int-quantized", ct_group(["Linear"], INT4, TOKENS)),
    ),
    "fp8 weights alone": (fp8("weight_scale", 1, -1), ct("naive-quantized", ct_group(["Linear"], FP8))),
    "fp8 weights alone, per tensor": (
        fp8("weight_scale", -1, -1, shape=("", (1,))),
        ct("float-quantized", ct_group(["Linear"], FP8_TENSOR)),
    ),
    "fp8 weights alone, in groups": (
        fp8("weight_scale", 1, 32),
        ct("naive-quantized", ct_group(["Linear"], FP8_GROUPS)),
    ),
    "fp8 in groups, activations per token": (
        fp8("weight_scale", 1, 32),
        ct("float-quantized", ct_group(["Linear"], FP8_GROUPS, FP8_TOKENS)),
    ),
    "mxfp8 of compressed-tensors": (
        mxfp8_of_compressed_tensors,
        ct("mxfp8-quantized", ct_group(["Linear"], MXFP8, MXFP8 | {"dynamic": True}, format="mxfp8-quantized")),
    ),
    "mxfp8 of compressed-tensors, weights alone": (
        mxfp8_of_compressed_tensors,
        ct("mxfp8-quantized", ct_group(["Linear"], MXFP8)),
    ),
    "5 bits": (packed(5, 32, True), ct("pack-quantized", ct_group(["Linear"], INT4 | {"num_bits": 5}))),
    "6 bits, asymmetric": (
        packed(6, 32, False),
        ct("pack-quantized", ct_group(["Linear"], INT4 | {"num_bits": 6, "symmetric": False})),
    ),
    "7 bits per channel": (packed(7, -1, True), ct("pack-quantized", ct_group(["Linear"], args(7)))),
    "5 bits in bytes": (
        integers("group", symmetric=False, bits=5),
        ct("int-quantized", ct_group(["Linear"], INT4 | {"num_bits": 5, "symmetric": False}, format="int-quantized")),
    ),
    "gptq without g_idx": (gptq(), _GPTQ),
    "gptq in format gptq_v2": (gptq(less=0), _GPTQ | {"format": "gptq_v2"}),
    "gptq with float32 scales": (gptq(dtype=torch.float32), _GPTQ),
    "awq with float32 scales": (lambda name, linear: awq(name, linear, torch.float32), _GPTQMODEL_AWQ),
    "gptq of 3 bits": (gptq(3), _GPTQ | {"bits": 3}),
    "gptq of 3 bits in activation order": (
        gptq(3, less=0, order=True),
        _GPTQ | {"bits": 3, "desc_act": True, "checkpoint_format": "gptq_v2", "pack_dtype": "int32"},
    ),
    "gptq of some layers": (
        by_name(("q_proj", gptq()), ("up_proj", gptq()), ("", None)),
        _GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]},
    ),
    "gptq dynamic": (
        by_name(("down_proj", gptq(8, 64)), ("k_proj", None), ("o_proj", gptq(symmetric=True)), ("", gptq())),
        _GPTQ
        | {
            "dynamic": {
                r"+:.*\.down_proj$": {"bits": 8, "group_size": 64},
                r"-:.*k_proj": {},
                r".*\.o_proj": {"sym": True},
            }
        },
    ),
    "gptq dynamic, of which the first rule counts": (
        by_name(("up_proj", gptq(8, 64)), ("gate_proj", None), ("mlp", gptq(4, 16)), ("", gptq())),
        _GPTQ
        | {"dynamic": {".*up_proj$": {"bits": 8, "group_size": 64}, "-:.*gate": {}, "+:.*mlp": {"group_size": 16}}},
    ),
    "auto-round": (
        by_name(("down_proj", gptq(8, -1 % 2**31, symmetric=True)), ("v_proj", None), ("", gptq(symmetric=True))),
        _ROUND
        | {
            "extra_config": {
                ".*down_proj": {"bits": 8, "group_size": -1},
                "model.layers.0.self_attn.v_proj": {"bits": 16},
                "model.layers.1.self_attn.v_proj": {"bits": 16, "data_type": "fp"},
            }
        },
    ),
    "auto-round, of which the first rule counts": (
        by_name(
            ("up_proj", gptq(8, 64, symmetric=True)),
            ("gate_proj", None),
            ("mlp", gptq(4, 16, symmetric=True)),
            ("", gptq(symmetric=True)),
        ),
        _ROUND
        | {
            "extra_config": {
                "up_proj$": {"bits": 8, "group_size": 64},
                ".*gate_proj": {"bits": 16},
                ".*mlp.*": {"group_size": 16},
            }
        },
    ),
    "auto-round before packing_format": (gptq(less=0), _FORMER_ROUND | {"backend": "auto_round:exllamav2"}),
    "auto-round before packing_format, as gptq": (gptq(), _FORMER_ROUND | {"backend": "auto_round:gptq:exllamav2"}),
    "auto-round before packing_format, as awq": (awq, _FORMER_ROUND | {"backend": "auto_round:auto_awq:gemm"}),
    "auto-round, kernel in packing_format": (
        gptq(less=0, symmetric=True),
        _ROUND | {"packing_format": "auto_round:exllamav2"},
    ),
    "auto-round, awq": (awq, _ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}),
    "awq of gptqmodel": (by_name(("o_proj", None), ("", awq)), _GPTQMODEL_AWQ | {"dynamic": {r"-:.*\.o_": {}}}),
    "fp8 blocks of 64 x 128": (fp8("weight_scale_inv", 64, 128), _FP8 | {"weight_block_size": [64, 128]}),
    "fp8 blocks of 256 x 128": (fp8("weight_scale_inv", 256, 128), _FP8 | {"weight_block_size": [256, 128]}),
    "fp8 blocks of 128 x 64": (fp8("weight_scale_inv", 128, 64), _FP8 | {"weight_block_size": [128, 64]}),
    "mxfp8": (mxfp8, {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}),
    "mxfp8, as fp8": (mxfp8, _FP8 | {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}),
    "fp8 per tensor, static": (
        fp8("weight_scale", -1, -1, shape=("", ()), inputs=("input_scale", ())),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "fp8 per tensor, dynamic": (
        fp8("weight_scale_inv", -1, -1, shape=("", ())),
        _FP8 | {"weight_block_size": None, "modules_to_not_convert": ["lm_head"]},
    ),
    "fp8 per tensor, nothing ignored": (fp8("weight_scale", -1, -1, shape=("", ())), _FP8),
    "fbgemm_fp8": (
        fp8("weight_scale", 1, -1),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
}
"""How layers are packed, and what the tool writes under ``quantization_config``."""
