"""Directories with FP4 weights: `inspect` names exactly the formats that `convert` writes, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.0")

from safetensors.torch import load_file, save_file

import epiloq
from command_line import WIDE, run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from rounded_models import same, weights
from tiny_mixtures import deepseek, gpt_oss, logits, published
from tiny_teacher import save, tiny_model


def by_command(scheme: str, layout: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save(folder / "model", tiny_model(**WIDE).bfloat16())
        options = ("--scheme", scheme, "--algorithm", "rtn", "--format", layout, "--output", folder / "in")
        result = run("quantize", folder / "model", *options)
        assert result.exit_code == 0, result.output
        return folder / "in"

    return make


def of_gpt_oss(folder: Path) -> Path:
    """Experts in stacks of blocks of 16 bytes."""
    gpt_oss().bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parts = [epiloq.fp4_quantize(matrix.t(), "mxfp4")[:2] for matrix in tensors.pop(name).float()]
        codes, scales = (torch.stack(each) for each in zip(*parts, strict=True))
        tensors |= {f"{name}_blocks": codes.view(*scales.shape, 16), f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    return folder


def of_deepseek(folder: Path) -> Path:
    """Experts in FP4 beside FP8 blocks."""
    published(deepseek(), folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if ".mlp.experts." not in name or name.startswith("model.layers.61."):
            tensors[name] = tensor
        elif layer != name:
            n, k = tensor.shape
            tensors[name] = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
            exponents = torch.randint(119, 123, (n, k // 32), dtype=torch.uint8)
            tensors[f"{layer}.weight_scale_inv"] = exponents.view(torch.float8_e8m0fnu)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    describe(folder, found | {"expert_dtype": "fp4"})
    return folder


def describe(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


MXFP4, NVFP4 = {"compressed-tensors", "deepseek-fp8", "epiloq"}, {"compressed-tensors", "modelopt", "epiloq"}
TOKENS = {"compressed-tensors", "epiloq"}
DIRECTORIES: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "mxfp4": (by_command("w4a16-mxfp4", "compressed-tensors"), MXFP4),
    "mxfp4, epiloq": (by_command("w4a16-mxfp4", "epiloq"), MXFP4),
    "nvfp4": (by_command("w4a16-nvfp4", "compressed-tensors"), NVFP4),
    "nvfp4, modelopt": (by_command("w4a16-nvfp4", "modelopt"), NVFP4),
    "nvfp4, epiloq": (by_command("w4a16-nvfp4", "epiloq"), NVFP4),
    "mxfp4 and tokens": (by_command("w4a8-mxfp4-fp8", "compressed-tensors"), TOKENS),
    "nvfp4 and tokens, epiloq": (by_command("w4a8-nvfp4-fp8", "epiloq"), TOKENS),
    "gpt-oss": (of_gpt_oss, MXFP4),
    # FP8 blocks of 128 columns do not fill its rows, which compressed-tensors needs.
    "deepseek": (of_deepseek, MXFP4 - {"compressed-tensors"}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", DIRECTORIES)
def test_inspect_names_what_convert_writes(seed: int, tmp_path: Path, what: str) -> None:
    make, expected = DIRECTORIES[what]
    folder = make(tmp_path / "source")
    result = run("inspect", folder, "--json", tmp_path / "facts.json")
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert {name for name, reason in facts["formats"].items() if reason is None} == expected
    judged = {note.split(":")[0] for note in facts["notes"] if "judged by one layer of each kind" in note}
    by_values = set() if "nvfp4" in what else {"deepseek-fp8"}
    by_values |= {"compressed-tensors"} if what == "nvfp4, modelopt" else set()
    assert judged == by_values & expected
    held = weights(folder)
    for layout, reason in facts["formats"].items():
        target = tmp_path / layout
        result = run("convert", folder, target, "--format", layout)
        shown = " ".join(result.output.split())
        if layout == facts["format"]:
            assert result.exit_code == 2 and f"is in the format {layout} already" in shown, shown
        elif reason is not None:
            assert result.exit_code == 2 and " ".join(reason.split()) in shown, shown
        else:
            assert result.exit_code == 0, shown
            assert same(weights(target), held)
            if layout == "epiloq":
                first, second = (models.load(Checkpoint(where))[0] for where in (folder, target))
                assert torch.equal(logits(first), logits(second))
