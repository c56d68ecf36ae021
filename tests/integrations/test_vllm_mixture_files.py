"""Mixtures that ``epiloq quantize`` writes, in vLLM's own layers: names, configurations and values of the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")

from safetensors.torch import load_file
from vllm.model_executor.layers.quantization import get_quantization_config

import epiloq.integrations.vllm as integration
from command_line import run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.integrations.vllm.experts import ExpertsMethod
from mixture_references import error
from tiny_mixtures import mixtral, qwen3
from vllm_kernel_lists import backends_of_gpus

FAMILIES: dict[str, tuple[Any, str, tuple[str, str, str]]] = {
    "qwen3": (
        lambda: qwen3(torch.bfloat16, moe_intermediate_size=128),
        "model.layers.1.mlp.experts",
        ("gate_proj", "down_proj", "up_proj"),
    ),
    "mixtral": (lambda: mixtral(torch.bfloat16), "model.layers.1.block_sparse_moe.experts", ("w1", "w2", "w3")),
}
"""The model, the experts' name in its files, and vLLM's arguments for the names of their matrices."""


@pytest.fixture(autouse=True)
def _all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.register()
    monkeypatch.setenv("EPILOQ_ENGINE_LAYERS", "all")
    backends_of_gpus(monkeypatch)


def configuration(folder: Path) -> Any:
    """The engine's, chosen as it does for a directory."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    method = found.get("quant_method") or "epiloq"
    name = {"awq": "auto_awq", "gptq": "auto_gptq"}.get(method, method)
    return get_quantization_config(name).from_config(found)


@pytest.mark.parametrize(
    ("family", "scheme", "layout"),
    [
        ("qwen3", "fp8-block", "deepseek-fp8"),
        ("qwen3", "fp8-token", "compressed-tensors"),
        ("qwen3", "w8a8-int8", "compressed-tensors"),
        ("qwen3", "w4a16-g32", "compressed-tensors"),
        ("qwen3", "w4a16-g32", "awq"),
        ("qwen3", "fp8-block", "epiloq"),
        ("qwen3", "w4a8-fp8", "epiloq"),
        ("qwen3", "w4a16-nvfp4", "epiloq"),
        ("mixtral", "w4a16-g32", "compressed-tensors"),
        ("mixtral", "w4a16-g32", "epiloq"),
    ],
)
def test_directories(seed: int, family: str, scheme: str, layout: str, tmp_path: Path) -> None:
    make, stored, matrices = FAMILIES[family]
    make().save_pretrained(tmp_path / "model")
    options = ("--scheme", scheme, "--algorithm", "rtn", "--format", layout, "--output", tmp_path / "out")
    result = run("quantize", tmp_path / "model", *options)
    assert result.exit_code == 0, result.output
    own = models.load(Checkpoint(tmp_path / "out"))[0].get_submodule("model.layers.1.mlp.experts")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    with vllm_on_cpu.engine() as config:
        layer = vllm_on_cpu.experts(
            configuration(tmp_path / "out"), 4, 2, 128, own.intermediate, prefix=stored, ckpt_names=matrices
        )
        assert isinstance(layer.routed_experts.quant_method, ExpertsMethod)
        given = {name.removeprefix(f"{stored}."): t for name, t in tensors.items() if name.startswith(f"{stored}.")}
        assert len(list(layer.load_weights(given.items()))) == len(given)
        vllm_on_cpu.settle(layer.routed_experts)
    for tokens in (1, 9):
        x, logits = torch.randn(tokens, 128, dtype=vllm_on_cpu.DTYPE), torch.randn(tokens, 4)
        weights, ids = vllm_on_cpu.top_k_of_softmax(x, logits, 2, True)
        y, expected = vllm_on_cpu.run_experts(layer, config, x, logits), own(x, ids.long(), weights)
        # AWQ's files have scales of float16, which vLLM rounds to the type of the model.
        assert error(y, expected.double()) < 2**-6 if layout == "awq" else torch.equal(y, expected)
