"""Rotations folded into a model's weights, at no cost at run time (R1 and R2 of QuaRot and SpinQuant).

A transformer whose norms have no weights computes the same if its hidden states are rotated: layers that write them
are multiplied by an orthogonal matrix, layers that read them by its transpose. The same applies to the values of each
attention head, between two linear layers. Rotated weights and inputs have fewer outliers, which reduces rounding
errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.observers import evaluating
from epiloq.quantize.algorithms.hadamard import rotation
from epiloq.weights.computed import check_finite

FAMILIES = ("llama", "mistral", "qwen2")
"""Kinds of models (``config.model_type``) whose hidden states only the layers named here read and write."""
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Maximum relative change of logits (Frobenius norm), caused by rounding weights to their dtype."""
PROBE_TOKENS = 16


@dataclass(frozen=True)
class Rotated:
    """The result.

    untied
        Whether the output head was tied to the embedding and is a separate tensor now.
    error
        Difference of the logits, in the sense of `BOUNDS`.
    """

    untied: bool
    error: float


def check_rotatable(model: nn.Module) -> None:
    """Raise ValueError, which names the architecture, if `rotate_` does not support it."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in FAMILIES or model.get_output_embeddings() is None:  # type: ignore[operator]
        raise ValueError(
            f"rotate_: model: expected a language model of {', '.join(FAMILIES)}, got {type(model).__name__} ({kind}): "
            "the layers that read its hidden states are not known"
        )


def untie_head_(model: Any) -> bool:
    """Give the output head a separate weight; returns whether it was tied to the embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    model.config.tie_word_embeddings = False
    return True


@torch.no_grad()
def rotate_(model: nn.Module, *, seed: int = 0) -> Rotated:
    """Fold norms' weights into the following layers, then rotations into all layers that read or write hidden states.

    The model computes the same within `BOUNDS`, in its own type, and keeps its architecture. A tied head becomes a
    separate tensor (``config.tie_word_embeddings`` is then False), because the last norm's weight is folded into it.
    Products are computed in float64.

    Args:
        model: a floating-point language model in transformers, of one of `FAMILIES`.
        seed: seed for the signs of the Hadamard matrices, or for random rotations.

    Raises:
        ValueError: an unsupported architecture, NaN or infinity in a parameter, or logits that differ by more than the
            bound; the weights are then unchanged.
    """
    check_rotatable(model)
    for name, parameter in model.named_parameters():
        check_finite(f"rotate_: {name}", parameter)
    parts = _Parts(model)
    tokens = torch.arange(PROBE_TOKENS, device=parts.embedding.weight.device)[None] % parts.embedding.num_embeddings
    before = _logits(model, tokens)
    head, tie_word_embeddings = parts.head.weight, model.config.tie_word_embeddings  # type: ignore[union-attr]
    with _restored_on_error(model):
        tied = untie_head_(model)
        try:
            _rotate(parts, torch.Generator().manual_seed(seed))
            error = float((_logits(model, tokens) - before).norm() / before.norm().clamp(min=1e-30))
            bound = BOUNDS[head.dtype]
            if not error <= bound:
                raise ValueError(
                    f"rotate_: {type(model).__name__}: expected logits within {bound:g} of those before, got "
                    f"{error:.2g}: something else reads its hidden states"
                )
        except BaseException:
            if tied:
                parts.head.weight = head
                model.config.tie_word_embeddings = tie_word_embeddings  # type: ignore[union-attr]
            raise
    return Rotated(tied, error)


class _Parts:
    """The layers that read and write the hidden states of a model."""

    def __init__(self, model: Any) -> None:
        body = model.get_decoder()
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.head: nn.Linear = model.get_output_embeddings()
        self.blocks: Sequence[Any] = list(body.layers)
        self.norm: Any = body.norm

    def reads(self) -> Iterator[tuple[Any, list[nn.Linear]]]:
        """Norms and the layers that read their outputs."""
        for block in self.blocks:
            attention, mlp = block.self_attn, block.mlp
            yield block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
            yield block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]
        yield self.norm, [self.head]

    def writes(self) -> Iterator[nn.Linear]:
        """Layers whose outputs are added to the hidden states."""
        for block in self.blocks:
            yield block.self_attn.o_proj
            yield block.mlp.down_proj


def _rotate(parts: _Parts, generator: torch.Generator) -> None:
    of_hidden = rotation(parts.embedding.embedding_dim, generator)
    for norm, readers in parts.reads():
        for layer in readers:
            _set(layer.weight, (layer.weight.double() * norm.weight.double()) @ of_hidden.to(layer.weight.device))
        norm.weight.fill_(1)
    _set(parts.embedding.weight, parts.embedding.weight.double() @ of_hidden.to(parts.embedding.weight.device))
    for layer in parts.writes():
        _rotate_outputs(layer, of_hidden, layer.out_features)
    for block in parts.blocks:
        values, output, size = block.self_attn.v_proj, block.self_attn.o_proj, block.self_attn.head_dim
        of_head = rotation(size, generator)
        _rotate_outputs(values, of_head, size)
        heads = output.weight.double().unflatten(1, (-1, size)) @ of_head.to(output.weight.device)
        _set(output.weight, heads.flatten(1))


def _rotate_outputs(layer: nn.Linear, matrix: Tensor, size: int) -> None:
    """Multiply each run of `size` outputs by a matrix, ``y Q``."""
    matrix = matrix.to(layer.weight.device)
    heads = layer.weight.double().unflatten(0, (-1, size))
    _set(layer.weight, torch.einsum("hik,ij->hjk", heads, matrix).flatten(0, 1))
    if layer.bias is not None:
        _set(layer.bias, (layer.bias.double().unflatten(0, (-1, size)) @ matrix).flatten())


def _set(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.to(parameter.dtype))


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with evaluating(model):
        logits: Tensor = model(tokens, use_cache=False).logits
    return logits.double()


@contextmanager
def _restored_on_error(model: nn.Module) -> Iterator[None]:
    """Restore every parameter's value if an error occurs."""
    before: Mapping[str, Tensor] = {name: value.detach().clone() for name, value in model.named_parameters()}
    targets = dict(model.named_parameters())
    try:
        yield
    except BaseException:
        for name, value in before.items():
            targets[name].copy_(value)
        raise
