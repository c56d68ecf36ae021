"""What each algorithm made reloads bit for bit: the model that calibration leaves, against the directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from epiloq.formats.io.model import from_directory
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.budget.amount import Budget
from epiloq.quantize.job import perform, prepare
from epiloq.quantize.settings import Settings
from tiny_teacher import save, tiny_model

WAYS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ALGORITHMS if "smoothquant" not in name},
    **{name: {"algorithm": name, "scheme": "w8a8-int8-static"} for name in ALGORITHMS if "smoothquant" in name},
    "per channel": {"algorithm": "gptq", "scheme": "w4a16"},
    "rotated": {"algorithm": "gptq", "rotate": True},
    "budget": {"algorithm": "gptq", "scheme": "w8a16", "budget": Budget(bits=5.5, candidates=("w4a16-g32", "w8a16"))},
}


@pytest.mark.parametrize("way", WAYS)
def test_reloads_bit_for_bit(seed: int, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "autoround", replace(ALGORITHMS["autoround"], learn=4))
    monkeypatch.setattr("epiloq.quantize.streaming.streamed", lambda *_: "the model is looked at afterwards")
    model = tiny_model(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    source = save(tmp_path / "model", model)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    options = {"scheme": "w4a16-g32", "calibration": tmp_path / "text.txt", "count": 4, "length": 80}
    job = prepare(Settings(source, tmp_path / "out", **{**options, **WAYS[way]}))
    perform(job)
    found = from_directory(tmp_path / "out")
    layers = [n for n, m in job.model.named_modules() if isinstance(m, nn.Linear) and "layers" in n]
    assert len(layers) == 14
    for name in layers:
        restored: Any = found.get_submodule(name)
        assert not isinstance(restored, nn.Linear)
        assert torch.equal(restored.dequantized_weight().float(), job.model.get_submodule(name).weight.float())
    for name, value in job.model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(found.get_parameter(name).float(), value.float())
