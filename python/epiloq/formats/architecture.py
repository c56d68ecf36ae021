"""Models of transformers by their config.json, before any tensor is in them, and their tensors by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats.checkpoint import Checkpoint
from epiloq.formats.layouts import FormatError


def architecture(checkpoint: Checkpoint) -> Any:
    """The class in transformers that a config.json names."""
    import transformers

    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    found = getattr(transformers, name, None) if name else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise FormatError(
            f"{checkpoint.folder / 'config.json'}: architectures: expected a model that transformers has, got {names!r}"
        )
    return found


def skeleton(checkpoint: Checkpoint, device: str = "cpu") -> nn.Module:
    """The model that a checkpoint is of, in its own type and evaluation mode, with whatever values.

    On "meta" it has none, and takes no memory.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with _default_dtype(config.dtype or torch.float32), torch.device(device):
        return architecture(checkpoint)(config).eval()  # type: ignore[no-any-return]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def model_config(model: nn.Module) -> dict[str, Any]:
    """The config.json of a model of transformers as it is."""
    found: dict[str, Any] = json.loads(model.config.to_json_string())  # type: ignore[operator,union-attr]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return found | {"architectures": [type(model).__name__], "dtype": dtype}


def distinct(model: nn.Module) -> Mapping[str, Tensor]:
    """The state dict without second names of tied weights."""
    seen: set[tuple[int, torch.Size]] = set()
    found = {}
    for name, tensor in model.state_dict().items():
        identity = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() == 0 or identity not in seen:
            found[name] = tensor
        seen.add(identity)
    return found
