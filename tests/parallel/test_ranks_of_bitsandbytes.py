"""Directories of bitsandbytes opened by several ranks, each of which has its part of every quantised layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import epiloq.integrations.transformers as integration
from bitsandbytes_layers import KINDS
from epiloq.formats.io import model as models
from foreign_checkpoints import llama, write
from gloo_ranks import Ranks
from opened_models import logits

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks(seed: int, tmp_path: Path, kind: str) -> None:
    write(tmp_path / "model", llama(), KINDS[kind], shards=1)
    expected = logits(models.from_directory(tmp_path / "model"))

    integration.register()

    def run(rank: int) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", tp_plan="auto")
        found = logits(model)
        assert not any(type(module) is nn.Linear for module in model.model.layers.modules())
        assert float((found - expected).norm() / expected.norm()) < 1e-4

    try:
        Ranks(tmp_path, 2, run).check()
    finally:
        integration.unregister()
