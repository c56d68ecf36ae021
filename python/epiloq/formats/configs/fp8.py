"""The configurations of FP8 directories: DeepSeek's blocks and FP4 experts, AutoFP8's tensors, and those of fbgemm."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from epiloq.formats.configs.keys import check_keys, names, one_of, skips
from epiloq.formats.description import FP4_EXPERTS, Description, Inputs, Rules
from epiloq.formats.layouts.base import FormatError
from epiloq.nn.base.prepared_linear import FP8_BLOCK

METHOD, FBGEMM, MXFP8 = "fp8", "fbgemm_fp8", "mxfp8"
_MX_BLOCK = [1, 32]
BLOCKS, TENSORS, SCALARS, ROWS = "fp8 blocks", "fp8 tensors", "fp8 scalars", "fp8 rows"
EXPERTS = FP4_EXPERTS[0]
SCALE = "scale"
"""The suffix of scales in DeepSeek-V4's own files."""
BY_SCALE = {BLOCKS: "fp8 blocks by scale", EXPERTS: FP4_EXPERTS[1]}
"""The layouts of the same tensors with this suffix."""
_KNOWN = {"quant_method", "activation_scheme", "weight_block_size", "fmt", "scale_fmt", "modules_to_not_convert"}
_KNOWN |= {"ignored_layers", "expert_dtype", "kv_cache_scheme"}
_NOTES = {"dequantize", "kv_cache_quant_targets"}
_WHERE = "quantization_config"
# The matrices of routed experts, under any of transformers' names.
_EXPERT = re.compile(r"(.*\.)?experts\.\d+\.")


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, naming key and value, for unsupported entries."""
    if found.get("quant_method") == FBGEMM:
        return _fbgemm(found)
    is_mx = found.get("quant_method") == MXFP8
    if not is_mx and found.get("quant_method") != METHOD:
        raise FormatError(f"{_WHERE}: quant_method: expected {METHOD}, got {found.get('quant_method')!r}")
    check_keys(found, _KNOWN, _WHERE, _NOTES)
    one_of(found, "fmt", "e4m3", ("e4m3", "float8_e4m3fn", None), _WHERE)
    one_of(found, "scale_fmt", "float", ("float", "ue8m0"), _WHERE)
    in_fp4 = one_of(found, "expert_dtype", "fp8", ("fp8", "fp4", None), _WHERE) == "fp4"
    scheme = one_of(found, "activation_scheme", "dynamic", ("dynamic", "static"), _WHERE)
    # AutoFP8 omits it in checkpoints without blocks, and "ignored_layers" in some of them (see `readers`). DeepSeek
    # always writes it.
    usual = None if "ignored_layers" in found or scheme == "static" else [FP8_BLOCK] * 2
    block = found.get("weight_block_size", _MX_BLOCK if is_mx else usual)
    if is_mx and block != _MX_BLOCK:
        raise FormatError(f"{_WHERE}: weight_block_size: expected {_MX_BLOCK} with {MXFP8}, got {block!r}")
    if block is None:
        return _all_but(found, of_tensors(scheme == "dynamic"), in_fp4)
    sizes = block if isinstance(block, list) and len(block) == 2 else [0]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise FormatError(f"{_WHERE}: weight_block_size: expected rows and columns, or null, got {block!r}")
    if scheme != "dynamic":
        raise FormatError(f"{_WHERE}: activation_scheme: expected dynamic with blocks, got {scheme!r}")
    inputs = Inputs("fp8", "group", group_size=sizes[1])
    powers = found.get("scale_fmt") == "ue8m0"
    described = Description(
        BLOCKS, "fp8", strategy="block", block=(sizes[0], sizes[1]), inputs=inputs, powers_of_two=powers
    )
    return _all_but(found, described, in_fp4)


def of_tensors(dynamic: bool) -> Description:
    """The description of FP8 weights with one scale each."""
    inputs = Inputs("fp8", "tensor", dynamic=dynamic)
    return Description(TENSORS, "fp8", strategy="tensor", inputs=inputs)


def _fbgemm(found: Mapping[str, Any]) -> Rules:
    check_keys(found, {"quant_method", "activation_scale_ub", "modules_to_not_convert"}, _WHERE)
    limit = found.get("activation_scale_ub", 1200.0)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
        raise FormatError(f"{_WHERE}: activation_scale_ub: expected a number above 0, got {limit!r}")
    inputs = Inputs("fp8", "token", limit=None if limit is None else float(limit))
    return _all_but(found, Description(ROWS, "fp8", strategy="channel", inputs=inputs))


def _all_but(found: Mapping[str, Any], described: Description, experts_in_fp4: bool = False) -> Rules:
    experts = described
    if experts_in_fp4:
        # With MXFP4 weights, activations are quantised as with FP8 weights, for kernels that multiply both.
        experts = replace(described, layout=EXPERTS, kind="fp4", bits=4, strategy="group", group_size=32, block=None)
    left = [name for key in ("modules_to_not_convert", "ignored_layers") for name in names(found, key, _WHERE)]

    def rules(layer: Sequence[str], kind: type[nn.Module]) -> Description | None:
        if any(skips(left, name) for name in layer):
            return None
        return experts if any(_EXPERT.match(name) for name in layer) else described

    return rules


def config(not_converted: Collection[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a model with 128 x 128 blocks; the named layers are in floating point."""
    return {
        "quant_method": METHOD,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(not_converted),
    }
