"""The Kullback-Leibler divergence of a model's predictions from a teacher's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from epiloq.evaluation.perplexity import logits_of

if TYPE_CHECKING:
    from torch import Tensor, nn


def divergence(
    teacher: nn.Module, model: nn.Module, windows: list[Tensor], advance: Callable[[], None] = lambda: None
) -> float:
    """Mean ``KL(teacher || model)`` in nats over all predictions in int64 ``[1, n]`` windows.

    The result is 0 for equal models and NaN if logits contain NaN. Logits are converted to fp32 and summed in float64.
    Raises ValueError for vocabularies of different sizes, or no windows.
    """
    import torch

    if not windows:
        raise ValueError("divergence: windows: expected at least one, got none")
    total, predicted = 0.0, 0
    with torch.inference_mode():
        for window in windows:
            expected, found = logits_of(teacher, window).float(), logits_of(model, window).float()
            if expected.shape != found.shape:
                raise ValueError(
                    f"divergence: expected equal vocabularies, got {expected.shape[-1]} and {found.shape[-1]} tokens"
                )
            logs = expected.log_softmax(-1)
            lost = logs.exp() * (logs - found.to(logs.device).log_softmax(-1))
            # A token with probability 0 by the teacher contributes 0.
            total += float(lost.where(logs != -torch.inf, 0.0).sum(dtype=torch.float64))
            predicted += window.numel()
            advance()
    return total / predicted
