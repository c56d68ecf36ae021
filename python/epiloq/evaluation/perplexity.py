"""Perplexity: the exponential of the mean negative log-likelihood of each token given those before it in its window."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def logits_of(model: nn.Module, window: Tensor) -> Tensor:
    """Logits ``[n, vocabulary]`` of a causal language model for int64 ``[1, n]`` tokens, on the model's device.

    Raises ValueError for a model that fails to run, because values in its configuration contradict each other.
    """
    import torch

    from epiloq.formats.io.safe_files import reason

    device = next(model.parameters()).device
    try:
        logits: Tensor = model(window.to(device), use_cache=False).logits[0]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        name = type(model).__name__
        raise ValueError(f"{name}: cannot run as its config.json describes it: {reason(error)}") from error
    return logits


def perplexity(model: nn.Module, windows: list[Tensor], advance: Callable[[], None] = lambda: None) -> float:
    """Perplexity of a causal language model over independent int64 [1, n] windows.

    A window of n tokens yields n - 1 predictions. Logits are converted to fp32 and summed in float64. The result is
    infinite if a token has probability 0, and NaN if logits contain NaN.
    """
    import torch

    for window in windows:
        if window.ndim != 2 or len(window) != 1:
            raise ValueError(f"perplexity: windows: expected int64 [1, n] each, got {list(window.shape)}")
    total, predicted = torch.zeros((), dtype=torch.float64), 0
    with torch.inference_mode():
        for window in windows:
            logits = logits_of(model, window)[:-1].float()
            loss = torch.nn.functional.cross_entropy(logits, window[0, 1:].to(logits.device), reduction="none")
            total += loss.sum(dtype=torch.float64).cpu()
            predicted += loss.numel()
            advance()
    return float(torch.exp(total / predicted))
