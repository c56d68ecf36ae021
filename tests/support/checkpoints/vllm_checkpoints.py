"""Configurations and tensors of compressed-tensors checkpoints, as vLLM reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

from epiloq.formats.layouts import words
from epiloq.nn import WeightOnlyLinear


def compressed_tensors(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, form: str) -> Any:
    """The engine's configuration of such a checkpoint."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    found = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}
    return CompressedTensorsConfig.from_config(found)


def arguments(bits: int, kind: str, strategy: str, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": dynamic, "symmetric": True, **more}


def words_of_compressed_tensors(module: WeightOnlyLinear) -> dict[str, Tensor]:
    q, scale, zero = module.packed.unpack()
    bits = module.bits
    middle = 1 << (bits - 1)
    codes = (q.to(torch.int16) + (middle if zero is None else 0)).to(torch.uint8)
    found = {"weight_packed": words.pack(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor(q.shape)}
    if zero is not None:
        found["weight_zero_point"] = words.pack(zero.t().contiguous(), bits).t().contiguous()
    return found
