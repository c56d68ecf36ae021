"""Blocks that are read one at a time: the same files as from a model in memory, in the memory of one block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

import transformers
from safetensors.torch import load_file

import epiloq
import more_families
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.quantize import job, streaming
from epiloq.quantize.settings import Settings
from epiloq.quantize.streaming import Streamed, streamed
from model_families import FAMILIES, outlying
from tiny_mixtures import deepseek, granite, mixtral, qwen3
from tiny_teacher import save, tiny_model

STATIC = {"scheme": "w8a8-int8-static", "algorithm": "smoothquant+gptq", "keep_dynamic": "auto"}
W4 = {"scheme": "w4a16-g32", "algorithm": "awq+gptq", "layout": "epiloq"}


def gpt2(dtype: torch.dtype = torch.float32) -> Any:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 256}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(dtype)


def llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    return tiny_model(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16).to(dtype)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llama, tied, bfloat16": (llama, W4),
    "llama, static": (llama, STATIC),
    "llama, guided": (llama, {"scheme": "w4a16-g32", "algorithm": "gptq-guided"}),
    "gpt2, transposed": (gpt2, W4),
    "gpt2, layers left": (gpt2, {"scheme": "w4a16-g32", "algorithm": "gptq", "ignore": ("*.c_fc",)}),
    "neox": (FAMILIES["neox"], W4),
    "opt": (FAMILIES["opt"], W4),
    "mixtral, renamed": (mixtral, W4),
    "qwen3, half": (lambda: qwen3(torch.float16, vocab_size=256), STATIC),
    "deepseek": (deepseek, {"scheme": "fp8-block", "algorithm": "rtn"}),
    "granite, stacked": (granite, W4),
    "llama4, stacked": (more_families.llama4, {"scheme": "w4a16-g32", "algorithm": "rtn"}),
    "t5, two lists": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=96)
        ),
        {"scheme": "w8a16", "algorithm": "rtn"},
    ),
}


def text(folder: Path) -> Path:
    file = folder / "text"
    file.write_text("".join(chr(33 + i * i % 61) for i in range(700)))
    return file


def files_of(folder: Path, model: Path, output: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    asked = {"count": 5, "length": 24, "force": True, "calibration": text(folder)} | options
    settings = Settings(model, folder / output, **asked)
    job.perform(job.prepare(settings))
    return load_file(folder / output / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_streamed_blocks_give_the_same_files(
    seed: int, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options = CASES[case]
    made = make().eval()
    model = save(tmp_path / "model", made if "llama4" in case else outlying(made))
    kept: list[Any] = []

    def noted(*arguments: Any) -> Any:
        kept.append(streamed(*arguments))
        return kept[-1]

    monkeypatch.setattr(streaming, "streamed", noted)
    found = files_of(tmp_path, model, "streamed", options)
    (opened,) = kept
    assert isinstance(opened, Streamed), opened
    assert all(p.is_meta for block in opened.blocks.values() for p in block.parameters())
    monkeypatch.setattr(streaming, "streamed", lambda *_: "in memory")
    expected = files_of(tmp_path, model, "whole", options)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    assert (tmp_path / "streamed/config.json").read_text() == (tmp_path / "whole/config.json").read_text()


def test_unsupported_models_are_not_streamed(seed: int, tmp_path: Path) -> None:
    """Files of another shape, without a type, or without a tensor: transformers loads those, or says what is wrong."""
    model = save(tmp_path / "model", llama())
    config = json.loads((model / "config.json").read_text())
    lists = ("model.layers",)
    assert isinstance(streamed(Checkpoint(model), "epiloq", lists), Streamed)
    (model / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")})
    )
    assert streamed(Checkpoint(model), "epiloq", lists) == "config.json names no dtype"
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 97}))
    assert "another shape" in str(streamed(Checkpoint(model), "epiloq", lists))
    (model / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    assert "of other tensors" in str(streamed(Checkpoint(model), "epiloq", lists))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["smoothquant"])
def test_memory(seed: int, tmp_path: Path, algorithm: str) -> None:
    """A model of 1.1 GB in blocks of 45 MB takes less than a third of that beside what an empty process takes."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=1024, intermediate_size=2432, num_attention_heads=8, num_hidden_layers=24
    )
    model = save(tmp_path / "model", transformers.LlamaForCausalLM(config).eval())
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert size > 1.0e9
    small = save(tmp_path / "small", tiny_model())
    peaks = [peak(tmp_path, source, algorithm, f"{source.name}-out") for source in (small, model)]
    assert peaks[1] - peaks[0] < size / 3, peaks


def peak(folder: Path, model: Path, algorithm: str, output: str) -> int:
    """Bytes that a run takes at most."""
    paths = os.pathsep.join([str(Path(epiloq.__file__).parents[1]), *sys.path])
    command = [sys.executable, "-m", "epiloq", "quantize", str(model), "--output", str(folder / output)]
    asked = ["--scheme", "w8a8-int8", "--algorithm", algorithm, "--json", str(folder / "json")]
    given = [] if algorithm == "rtn" else ["--calibration", str(text(folder)), "--windows", "4", "--length", "64"]
    subprocess.run(
        [*command, *asked, *given], env=os.environ | {"PYTHONPATH": paths}, check=True, capture_output=True, timeout=500
    )
    return int(json.loads((folder / "json").read_text())["peak_memory_bytes"])
