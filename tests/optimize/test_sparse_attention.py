"""Attention that puts a choice of keys into the mask only where it is called sdpa, as DeepSeek-V3.2's does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import epiloq
from other_mixtures import deepseek_v32, logits


@pytest.mark.filterwarnings("ignore:quantize_. left in floating point")
def test_attention_to_chosen_keys_is_not_replaced(seed: int) -> None:
    """A model that puts an indexer's choice into the mask only where attention is called sdpa."""
    model = epiloq.quantize_(deepseek_v32(), "w4a16-g32")
    y = logits(model)
    report = epiloq.optimize_(model)
    assert not report.grouped_attention
    assert "attention: DeepseekV32Attention does something else where it is called sdpa" in str(report)
    torch.testing.assert_close(logits(model), y, rtol=1e-4, atol=1e-4)
