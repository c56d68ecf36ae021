"""Entries of configurations that change the computation and are not understood: refused, naming key and value."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import foreign_variants as variants
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.readers import parse

CT = variants.ct("pack-quantized", variants.ct_group(["Linear"], variants.INT4))
W8A8 = variants.ct("int-quantized", variants.ct_group(["Linear"], variants.args(), variants.TOKENS))
GPTQ = variants.VARIANTS["gptq dynamic"][1]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
ROUND = variants.VARIANTS["auto-round"][1]
FORMER_ROUND = {key: value for key, value in ROUND.items() if key != "packing_format"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FBGEMM = variants.VARIANTS["fbgemm_fp8"][1]


def weights(base: dict[str, Any], **change: Any) -> dict[str, Any]:
    (group,) = base["config_groups"].values()
    return {"config_groups": {"group_0": group | {"weights": group["weights"] | change}}}


def inputs(base: dict[str, Any], **change: Any) -> dict[str, Any]:
    (group,) = base["config_groups"].values()
    return {"config_groups": {"group_0": group | {"input_activations": group["input_activations"] | change}}}


HADAMARD = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"]}]}}}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (CT, {"transform_config": HADAMARD}, "transform_config: expected none.*'R4'"),
        (CT, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: .*'sparse-24-bitmask'"),
        (CT, {"moe_sparsity_config": {"a": 1}}, r"moe_sparsity_config: .*\{'a': 1\}"),
        (CT, {"kv_cache_scheme": {"num_bits": 8, "rotate": "qk"}}, "kv_cache_scheme: rotate: .*'qk'"),
        (CT, {"a_new_key": 3}, "compressed-tensors: a_new_key: .*got 3"),
        (CT, {"format": "marlin-24"}, "format: expected pack-quantized or int-quantized, got 'marlin-24'"),
        (CT, weights(CT, strategy="attn_head"), "weights: expected scales in the files"),
        (CT, weights(CT, strategy="block", group_size=None, block_structure=[8, 8]), "integers in blocks"),
        (CT, weights(CT, dynamic=True), "weights: expected scales in the files"),
        (CT, weights(CT, type="nf"), "weights: type: expected int or float, got 'nf'"),
        (CT, weights(CT, type="float"), "format: expected mxfp4-pack-quantized, got .pack-quantized."),
        (CT, weights(CT, num_bits=6, type="float"), "expected symmetric floats of 4 or 8 bits, got .*'num_bits': 6"),
        (
            CT,
            weights(CT, num_bits=8, type="float", symmetric=True, scale_dtype="torch.uint8", group_size=64),
            r"scale_dtype: expected uint8 only of groups of 32 \(MXFP8\)",
        ),
        (
            CT,
            weights(CT, num_bits=8, type="float", symmetric=True, scale_dtype="torch.uint8"),
            "format: expected mxfp8-quantized, got 'pack-quantized'",
        ),
        (CT, weights(CT, num_bits=9), "bits: expected 2 to 8, got 9"),
        (CT, weights(CT, symmetric="yes"), "symmetric: expected true or false, got 'yes'"),
        (CT, weights(CT, clip_ratio=0.9), "weights: clip_ratio: .*got 0.9"),
        (CT, {"config_groups": {"W4A16": ["Linear"]}}, "config_groups: expected one or more objects"),
        (W8A8, weights(W8A8, symmetric=False), "expected symmetric weights"),
        (W8A8, weights(W8A8, strategy="group", group_size=32), "expected symmetric weights per channel or tensor"),
        (W8A8, inputs(W8A8, num_bits=4), "input_activations: num_bits: expected 8, got 4"),
        (W8A8, inputs(W8A8, strategy="group", group_size=32), "input_activations: .*got int8 per group of 32"),
        (W8A8, inputs(W8A8, strategy="tensor"), "input_activations: .*got int8 per tensor"),
        (GPTQ, {"adapter": {"name": "lora", "rank": 8}}, "gptq: adapter: .*'lora'"),
        (GPTQ, {"method": "qqq"}, "gptq: method: expected gptq .*'qqq'"),
        (AWQ, {"method": "paroquant"}, "awq: method: expected awq .*'paroquant'"),
        (AWQ, {"dynamic": {"+:.*down_proj": {"group_size": 64}}}, r"awq: dynamic: \+:.*down_proj: expected"),
        (AWQ, {"dynamic": {"-:(": {}}}, "awq: dynamic: expected a regular expression"),
        (AWQ, {"pack_dtype": "int64"}, "awq: pack_dtype: expected int32 .*'int64'"),
        (GPTQ, {"rotation": "hadamard"}, "gptq: rotation: .*'hadamard'"),
        (GPTQ, {"is_marlin_format": True}, "gptq: is_marlin_format: .*True"),
        (GPTQ, {"pack_dtype": "int8"}, "gptq: pack_dtype: expected int32.*'int8'"),
        (GPTQ, {"checkpoint_format": "bitblas"}, "gptq: checkpoint_format: expected one of gptq, gptq_v2.*'bitblas'"),
        (GPTQ, {"checkpoint_format": "gptq", "format": "gptq_v2"}, "checkpoint_format, format: .*'gptq' and 'gptq_v2'"),
        (GPTQ, {"dynamic": {"+:x": {"rotation": "r"}}}, "dynamic: .*rotation: .*'r'"),
        (GPTQ, {"dynamic": {"+:(": {}}}, "dynamic: expected a regular expression"),
        (GPTQ, {"dynamic": {"+:x": {"bits": 12}}}, "bits: expected 2 to 8, got 12"),
        (AWQ, {"smooth": "x"}, "awq: smooth: .*'x'"),
        (ROUND, {"data_type": "mx_fp"}, "auto-round: data_type: expected int.*'mx_fp'"),
        (ROUND, {"act_bits": 8}, "auto-round: act_bits: expected None or 16 or 32, got 8"),
        (ROUND, {"packing_format": "auto_round:llm_compressor"}, "packing_format: .*'auto_round:llm_compressor'"),
        (FORMER_ROUND, {"backend": "auto_round:marlin"}, "auto-round: backend: expected auto .*'auto_round:marlin'"),
        (FORMER_ROUND, {"backend": "ipex"}, "auto-round: backend: expected auto .*'ipex'"),
        (ROUND, {"group_size": None}, "auto-round: quantization_config: expected bits and group_size"),
        (ROUND, {"extra_config": {"a": {"data_type": "fp8"}}}, "extra_config: a: data_type: .*'fp8'"),
        (FP8, {"activation_scheme": "static"}, "activation_scheme: expected dynamic with blocks"),
        (FP8, {"weight_block_size": "128x128"}, "weight_block_size: .*'128x128'"),
        (FP8, {"modules_to_convert": ["embed"]}, "modules_to_convert"),
        (FBGEMM, {"activation_scale_ub": -1}, "activation_scale_ub: expected a number above 0, got -1"),
        (FP8, {"quant_method": "quanto"}, "quant_method: expected one that epiloq reads, got 'quanto'"),
        (CT, weights(CT, symetric=False), "weights: symetric: expected symmetric, got symetric with the value False"),
        (CT, weights(CT, groupSize=64), "weights: groupSize: expected group_size, got groupSize with the value 64"),
        (W8A8, inputs(W8A8, symmetric_=False), "input_activations: symmetric_: expected symmetric"),
        (CT, {"ignores": ["lm_head"]}, "ignores: expected ignore, got ignores"),
        (GPTQ, {"desc_acts": True}, "gptq: desc_acts: expected desc_act"),
        (GPTQ, {"dynamic": {"+:x": {"group-size": None}}}, "group-size: expected group_size"),
        (AWQ, {"zero_points": False}, "awq: zero_points: expected zero_point"),
        (FP8, {"weight_block_sizes": None}, "weight_block_sizes: expected weight_block_size"),
        (FBGEMM, {"activation_scaleub": None}, "activation_scaleub: expected activation_scale_ub"),
    ],
)
def test_refused(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    assert parse(base)(["model.layers.0.mlp.up_proj"], nn.Linear) is not None
    with pytest.raises(ValueError, match=message):
        parse(base | change)


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (CT, {"sparsity_config": {"format": "dense", "sparsity_structure": "unstructured", "global_sparsity": 0.1}}),
        (CT, {"transform_config": {"config_groups": {}}, "run_compressed": True}),
        (CT, weights(CT, observer="mse", observer_kwargs={"p": 2.4}, zp_dtype="torch.int8", actorder="weight")),
        (GPTQ, {"meta": {"quantizer": ["gptqmodel:5"]}, "damp_percent": 0.05, "adapter": None, "lm_head": False}),
        (AWQ, {"modules_to_not_convert": None, "backend": "autoawq"}),
        (ROUND, {"super_bits": None, "seqlen": 2048, "enable_torch_compile": False}),
        (FP8, {"scale_fmt": "float", "dequantize": False, "modules_to_convert": None, "fmt": None}),
        (GPTQ, {"checkpoint_format": "gptq", "format": "gptq", "desc_act": None}),
        (CT, {"moe_sparsity_config": {}, "transform_configuration_file": None}),
        (ROUND, {"act_data_type": None, "act_group_size": None, "act_sym": None, "act_dynamic": None}),
    ],
)
def test_notes_change_nothing(base: dict[str, Any], change: dict[str, Any]) -> None:
    layer = ["model.layers.0.mlp.up_proj"]
    assert parse(base | change)(layer, nn.Linear) == parse(base)(layer, nn.Linear)


def test_scales_of_activations_that_are_not_rounded_are_a_loss() -> None:
    """DeepSeek-V3.1 asks for them with ``scale_fmt``."""
    layer = ["model.layers.0.mlp.up_proj"]
    usual, rounded = (parse(FP8 | {"scale_fmt": form})(layer, nn.Linear) for form in ("float", "ue8m0"))
    assert usual is not None and usual.loss is None
    assert rounded is not None and "not rounded up to powers of two" in str(rounded.loss)
    assert rounded.module == usual.module


def test_selection_by_name() -> None:
    class Special(nn.Linear):
        pass

    config = variants.ct(
        "pack-quantized",
        variants.ct_group(["Special"], variants.args(2)),
        variants.ct_group(["Linear"], variants.args(3)),
        variants.ct_group(["re:model.*up"], variants.args(4)),
        variants.ct_group(["model.0.up"], variants.args(8)),
        ignore=["re:.*gate", "stored.name", "Embedding"],
    )
    rules = parse(config)

    def bits(*names: str, kind: type[nn.Module] = nn.Linear) -> int | None:
        found = rules(names, kind)
        return None if found is None else found.bits

    assert bits("model.0.up") == 8 and bits("model.1.up") == 4 and bits("x") == 3 and bits("x", kind=nn.Conv2d) is None
    assert bits("x", "model.0.up") == 8 and bits("model.0.gate") is None and bits("x", "stored.name") is None
    assert bits("x", kind=Special) == 3  # The classes of a group come after its names, sorted as the package does.
    compressed = pytest.importorskip("compressed_tensors.utils.match")
    targets = [target for group in config["config_groups"].values() for target in group["targets"]]
    for name, kind in (("model.0.up", nn.Linear), ("model.1.up", nn.Linear), ("x", nn.Linear), ("x", Special)):
        first = compressed.match_targets(name, kind(1, 1), targets)[0]
        (wanted,) = [g["weights"]["num_bits"] for g in config["config_groups"].values() if first in g["targets"]]
        assert bits(name, kind=kind) == wanted


def test_tensors_without_a_description() -> None:
    with pytest.raises(FormatError, match="expected one or more objects"):
        parse(CT | {"config_groups": None})
