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
    """Mean of ``KL(teacher || model)`` over the predictions of all tokens, in nats, over int64 ``[1, n]`` windows.

    0 for equal models. Logits are taken to fp32 and summed in float64. NaN when logits hold a NaN. Raises ValueError
    for vocabularies of different sizes, or no windows.
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
                    f"divergence: expected one vocabulary, got {expected.shape[-1]} and {found.shape[-1]} tokens"
                )
            logs = expected.log_softmax(-1)
            lost = logs.exp() * (logs - found.to(logs.device).log_softmax(-1))
            # A token that the teacher gives no probability adds nothing.
            total += float(lost.where(logs != -torch.inf, 0.0).sum(dtype=torch.float64))
            predicted += window.numel()
            advance()
    return total / predicted
