"""Comparison of two directories of one model, quantised or not: weights, sizes and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.evaluation.perplexity import logits_of
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError


@dataclass(frozen=True)
class LayerError:
    """Difference between the dequantised weights of a linear layer in A and B, computed in float32.

    largest
        Largest absolute difference of two elements.
    relative
        ``||B - A|| / ||A||`` (Frobenius); 0 if both are zero, infinite if only A is.
    equal
        Whether all elements are equal; NaN is unequal to itself.
    """

    name: str
    shape: tuple[int, int]
    largest: float
    relative: float
    equal: bool


def weight_errors(a: Layers, b: Layers) -> Iterator[LayerError]:
    """Yield the error of each linear layer, one at a time. Raises FormatError if the models' layers differ."""
    for name in sorted(a.linears.keys() | b.linears.keys()):
        for one, other in ((a, b), (b, a)):
            if name not in one.linears:
                raise FormatError(f"{one.checkpoint.folder}: {name}: {other.checkpoint.folder} has this layer")
        if a.shape(name) != b.shape(name):
            raise FormatError(
                f"{b.checkpoint.where(name)}: expected the shape {list(a.shape(name))} of {a.checkpoint.folder}, "
                f"got {list(b.shape(name))}"
            )
        first, second = a.dequantize(name), b.dequantize(name)
        if first is not None and second is not None:
            yield layer_error(name, first, second)


def layer_error(name: str, a: Tensor, b: Tensor) -> LayerError:
    """Compare two weights ``[N, K]``."""
    difference = (b - a).abs_()
    lost, whole = float(difference.norm()), float(a.norm())
    relative = lost / whole if whole else 0.0 if lost == 0 else float("inf")
    largest = float(difference.max()) if difference.numel() else 0.0
    return LayerError(name, (a.shape[0], a.shape[1]), largest, relative, torch.equal(a, b))


def other_tensors(a: Layers, b: Layers) -> list[str]:
    """Names of tensors other than linear weights (norms, embeddings, biases) that differ or that one model lacks."""

    def theirs(layers: Layers) -> set[str]:
        weights = {f"{name}.weight" for name in layers.linears}
        return {name for name in layers.rest if name not in weights}

    first, second = theirs(a), theirs(b)
    shared = first & second
    differing = {
        name for name in shared if not torch.equal(*_alike(a.checkpoint.tensor(name), b.checkpoint.tensor(name)))
    }
    return sorted(differing | (first ^ second))


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return (a, b) if a.dtype == b.dtype else (a.double(), b.double())


@torch.inference_mode()
def answers(
    a: nn.Module, b: nn.Module, windows: Sequence[Tensor], advance: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Compare the predictions of two causal language models over independent int64 ``[1, n]`` windows.

    Returns the perplexity of both, the mean and the largest ``KL(A || B) = sum p_A (log p_A - log p_B)`` of a token in
    nats, and the fraction of tokens for which both predict the same next token. Logits are compared in float32 and
    summed in float64. ``advance`` is called after each window.
    """
    lost_a = lost_b = divergence = torch.zeros((), dtype=torch.float64)
    largest, agreed, tokens, predicted = 0.0, 0, 0, 0
    for window in windows:
        logits = [logits_of(model, window).cpu() for model in (a, b)]
        if logits[0].shape != logits[1].shape:
            sizes = " and ".join(str(each.shape[-1]) for each in logits)
            raise FormatError(f"expected two models with equal vocabularies, got {sizes} tokens")
        p, q = (values.float().log_softmax(-1) for values in logits)
        # A token with probability 0 in A contributes 0, whatever its probability in B.
        each = torch.where(p == -torch.inf, 0, p.exp() * (p - q)).sum(-1).double()
        target = window[0, 1:, None]
        lost_a = lost_a - p[:-1].gather(1, target).sum(dtype=torch.float64)
        lost_b = lost_b - q[:-1].gather(1, target).sum(dtype=torch.float64)
        divergence, largest = divergence + each.sum(), max(largest, float(each.max()))
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        tokens, predicted = tokens + window.numel(), predicted + target.numel()
        advance()
    return {
        "tokens": tokens,
        "perplexity_a": float((lost_a / predicted).exp()),
        "perplexity_b": float((lost_b / predicted).exp()),
        "kl_mean": float(divergence / tokens),
        "kl_largest": largest,
        "top1_agreement": agreed / tokens,
    }
