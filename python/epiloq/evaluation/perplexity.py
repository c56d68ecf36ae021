"""Perplexity: the exponential of the mean negative log-likelihood of each token given those before it in its window."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def perplexity(model: nn.Module, windows: list[Tensor], advance: Callable[[], None] = lambda: None) -> float:
    """Perplexity of a causal language model over int64 [1, n] windows, each seen without the others.

    A window of n tokens gives n - 1 predictions. Logits are taken to fp32 and summed in float64. Infinite when the
    model gives a token no probability, NaN when its logits hold a NaN.
    """
    import torch

    device = next(model.parameters()).device
    total, predicted = torch.zeros((), dtype=torch.float64), 0
    with torch.inference_mode():
        for window in windows:
            tokens = window.to(device)
            logits = model(tokens, use_cache=False).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            total += loss.sum(dtype=torch.float64).cpu()
            predicted += loss.numel()
            advance()
    return float(torch.exp(total / predicted))
