"""Runs of a model on text alone, which is all that calibration has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats.io.safe_files import reason
from epiloq.formats.layouts.base import FormatError

TEXT = "input_ids"
INSTEAD = "use a scheme without static scales and --algorithm rtn, or epiloq.quantize_ and save_pretrained"


def other_input(model: nn.Module) -> str | None:
    """The input that a model of transformers runs on if that is not text, such as ``pixel_values``."""
    found = getattr(model, "main_input_name", TEXT)
    return None if found == TEXT else str(found)


def run_on_text(model: nn.Module, tokens: Tensor) -> Any:
    """``model(tokens)``; where there is a decoder beside an encoder, both read the same tokens."""
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model(tokens, decoder_input_ids=tokens) if two else model(tokens)


@contextmanager
def needing_more_than_text(model: nn.Module) -> Iterator[None]:
    """Raise ValueError, which names the model, if its own code fails, as that of CLIP does without images."""
    try:
        yield
    except (torch.OutOfMemoryError, OSError, FormatError):
        raise
    except Exception as error:
        name = type(model).__name__
        raise ValueError(f"calibrate: {name} cannot be run on text alone: {reason(error)}; {INSTEAD}") from error
