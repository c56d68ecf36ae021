"""A decode step of a whole decoder layer, without calling its modules one by one.

At batch 1 a step takes as long as the host needs to launch it. Calling the twelve modules of a decoder layer, each with
checks of its own, takes longer than the launches. So everything is checked once, and then the functions that the
modules run are called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from epiloq._torch.calls import direct
from epiloq._torch.tracing import is_exporting
from epiloq.optimize import forms
from epiloq.optimize.attention import attend_plainly
from epiloq.optimize.guards import are_plain, untouched
from epiloq.optimize.norms import factor_of, normed_by, sum_normed_by
from epiloq.optimize.rotary import CACHES, angle_width_of, counts_of, names_of, rotated_heads
from epiloq.optimize.siblings import Siblings, member
from epiloq.optimize.sinks import sink_attention
from epiloq.optimize.tokens import Quantized, activated, gated, measure_of, multiply, normed, quantises

GATED = ("gate_proj", "up_proj")
GATED_IN_ONE = ("gate_up_proj",)
SILU = ("SiLU", "SiLUActivation")
# Arguments of a decoder layer that a step reads, or that mean nothing to it.
_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "position_embeddings",
        "position_ids",
        "use_cache",
        "cache_position",
        "output_router_logits",  # recorded by a hook of the router
        *CACHES,
    }
)
_any_autocast = torch._C._is_any_autocast_enabled
_grad_enabled = torch.is_grad_enabled


def activation_of(act: Any) -> Callable[[Tensor], Tensor]:
    """What an activation computes."""
    return nn.functional.silu if type(act).__name__ in SILU else act.forward


def act_of(mlp: Any) -> Any:
    """The activation of a gated MLP."""
    return mlp.act_fn if "act_fn" in mlp._modules else mlp._modules.get("activation_fn")


# Attribute of a layer's output with the result of the next layer's first norm.
_PREPARED = "_epiloq_prepared"


class _Half(NamedTuple):
    """Half of a decoder layer: a norm, the layers that multiply its output as one product (None if another module
    does), whether the norm may quantise for them, and the norm before the residual addition, if any. Each norm is
    given by its ``forward``."""

    norm: Any
    siblings: Siblings | None
    takes_quantized: bool
    after: Any = None


class _Parts(NamedTuple):
    """A decoder layer's modules, found to be as `optimize_` left them, and what each of them held then."""

    attention: Any
    output: Any
    mlp: Any
    down: Any
    """The MLP's last layer; None if the MLP is called as a module, as a mixture of experts is."""
    activate: Any
    counts: list[int]
    """Heads of query, key and value."""
    angles: int
    """Of a head."""
    norms: list[Any]
    """In order, by their ``forward``."""
    halves: tuple[_Half, _Half]
    children: dict[str, Any]
    held: list[tuple[dict[str, Any], Any, dict[str, Any]]]
    dropouts: list[dict[str, Any]]


class _Prepared(NamedTuple):
    """A layer's input as its first norm left it, which was computed with the sum that is its input."""

    tokens: Tensor | Quantized
    of: _Parts
    version: int
    """Of the sum."""


class Step:
    """A decode step of a decoder layer in Llama's, GPT-OSS's or Gemma 2's form whose attention and norms are fused. So
    may be the MLP; another one, such as a mixture of experts, is called.

    A layer ends with a sum, of which the next layer first computes the norm: one kernel does both, if the layers are
    chained (`chain_`). Whoever else reads the sum, or changes it, gets what it would have without.
    """

    def __init__(
        self,
        block: Any,
        around: tuple[tuple[str, ...], tuple[str, ...]],
        takes_quantized: tuple[bool, bool],
        ours: tuple[Callable[..., Any], ...],
    ) -> None:
        self._block, self._around, self._takes_quantized, self._ours = block, around, takes_quantized, ours
        self._heads, self._form = vars(block.self_attn)["forward"].args[1:3]
        gated: Any = vars(block.mlp)["forward"].args[1:3] if _is(block.mlp, ours[1]) else (None, None)
        self._gated, self._act = gated
        self._names = names_of(self._form)
        self._parts: _Parts | None = None
        # Steps of a model's layers in order, of which this one has the index. A list, since references from each to the
        # next would make copying recursive.
        self.chain: list[Step] = [self]
        self.index = 0

    @property
    def following(self) -> Step | None:
        """The next layer's step, if it may compute its norm of this one's output."""
        return self.chain[self.index + 1] if self.index + 1 < len(self.chain) else None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_parts": None}

    def __call__(self, x: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        """The layer's output ``[B, 1, hidden]``; None unless this is a step without a gradient, of plain tensors, by
        modules that nothing watches, replaced or changed."""
        if not direct((x,)) or x.dim() != 3 or x.shape[1] != 1 or _grad_enabled() or _any_autocast():
            return None
        if not x.is_contiguous() or not arguments.keys() <= _ARGUMENTS or is_exporting():
            return None
        parts, angles = self._checked(), arguments.get("position_embeddings")
        if parts is None or angles is None or any(t.dtype != x.dtype for t in angles):
            return None
        if not are_plain(*angles) or angles[0].shape[-1] != parts.angles:
            return None
        factors: list[Tensor] = []
        for norm in parts.norms:
            factor = factor_of(norm, x)
            if factor is None:
                return None
            factors.append(factor)
        first, second = parts.halves
        prepared: _Prepared | None = vars(x).pop(_PREPARED, None)
        if prepared is not None and prepared.of is parts and prepared.version == x._version:
            tokens, residual = prepared.tokens, x
        else:
            tokens, residual = _normed(first, factors[0], x, None)
        attended = self._attend(parts, _product(first, tokens), angles, arguments)
        if first.after is not None:
            attended = normed_by(first.after, factors[1], attended)
        before = 1 if first.after is None else 2
        if parts.down is None:
            y, residual = sum_normed_by(second.norm, factors[before], attended, residual)
            projected = parts.mlp(y)
            if isinstance(projected, tuple):  # with its router's scores
                projected = projected[0]
        else:
            tokens, residual = _normed(second, factors[before], attended, residual)
            projected = _project(parts.down, parts.activate, _product(second, tokens))
        if second.after is not None:
            projected = normed_by(second.after, factors[-1], projected)
        following = self.following
        total = None if following is None else following.prepared(projected, residual)
        return residual + projected if total is None else total

    def prepared(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """``x + residual`` for this layer, which will find its norm prepared; None if that is not possible."""
        # Not checked again: if anything has changed since, the layer does not use what was prepared.
        parts = None if x.is_inference() else self._parts or self._checked()
        factor = None if parts is None else factor_of(parts.halves[0].norm, x)
        if parts is None or factor is None:
            return None
        tokens, total = _normed(parts.halves[0], factor, x, residual)
        vars(total)[_PREPARED] = _Prepared(tokens, parts, total._version)
        return total

    def _checked(self) -> _Parts | None:
        """The modules, unless one has changed or does not compute what its class defines or what is combined here."""
        parts = self._parts
        if parts is None:
            parts = self._parts = self._found()
            if parts is None:
                return None
        state = vars(parts.attention)
        # Configurations have a slow __getattribute__ of their own.
        config = object.__getattribute__(state["config"], "__dict__")
        if state["training"] or config.get("_attn_implementation_internal") not in self._names:
            return None
        if torch_module._has_any_global_hook() or vars(self._block)["_modules"] != parts.children:
            return None
        if any(state["training"] for state in parts.dropouts):
            return None
        for state, forward, children in parts.held:
            if state["_forward_hooks"] or state["_forward_pre_hooks"] or state.get("forward") is not forward:
                return None
            if state["_modules"] != children:
                return None
        return parts

    def _found(self) -> _Parts | None:
        block = self._block
        if not is_made_of(block, self._around, self._ours):
            return None
        if _is(block.mlp, self._ours[1]) != (self._gated is not None):
            return None
        attention, mlp = block.self_attn, block.mlp
        norms = [getattr(block, name) for names in self._around for name in names]
        dropouts: list[Any] = [block._modules[name] for name in forms.DROPOUTS if name in block._modules]
        modules = [m for part in (attention, *norms, *dropouts) for m in part.modules()]
        if self._gated is not None:
            modules += mlp.modules()
            if act_of(mlp) is not self._act or not self._gated.unchanged_in(mlp):
                return None
        if not self._heads.unchanged_in(attention):
            return None
        if not all(untouched(m, *self._ours, member) for m in modules):
            return None
        forwards = [vars(norm)["forward"] for norm in norms]
        first, second = forwards[: len(norms) // 2], forwards[len(norms) // 2 :]
        halves = (
            _Half(first[0], self._heads, self._takes_quantized[0], *first[1:]),
            _Half(second[0], self._gated, self._takes_quantized[1], *second[1:]),
        )
        held = [(vars(m), vars(m).get("forward"), dict(m._modules)) for m in modules]
        counts = counts_of(attention, self._heads)
        down, activate = (None, None) if self._gated is None else (mlp.down_proj, activation_of(self._act))
        return _Parts(
            attention=attention,
            output=attention.o_proj,
            mlp=mlp,
            down=down,
            activate=activate,
            counts=counts,
            angles=angle_width_of(attention, self._form),
            norms=forwards,
            halves=halves,
            children=dict(block._modules),
            held=held,
            dropouts=[vars(dropout) for dropout in dropouts],
        )

    def _attend(self, parts: _Parts, product: Tensor, angles: Any, arguments: dict[str, Any]) -> Tensor:
        attention, (cos, sin) = parts.attention, angles
        width, batch, counts = attention.head_dim, product.shape[0], parts.counts
        heads = product.view(batch, 1, -1, width)
        cache = None
        for name in CACHES:  # one of them
            cache = arguments.get(name, cache)
        query, key, value = rotated_heads(attention, self._form.norms_heads, heads, counts, cos, sin, cache, True)
        mask = arguments.get("attention_mask")
        if self._form.has_sinks:
            heads = query.transpose(1, 2)
            attended, _ = sink_attention(attention, heads, key, value, mask, scaling=attention.scaling)
        else:
            attended = attend_plainly(attention, query, key, value, mask, attention.scaling)
        return parts.output.forward(attended.reshape(batch, 1, -1).contiguous())  # type: ignore[no-any-return]


def _normed(half: _Half, factor: Tensor, x: Tensor, residual: Tensor | None) -> tuple[Tensor | Quantized, Tensor]:
    """``norm(x + residual)``, quantised if the layers that read it quantise, and the sum."""
    assert half.siblings is not None
    layer = half.siblings.layers[0]
    if half.takes_quantized and quantises(layer, x):
        return normed(half.norm.args[0], x, residual, layer, True)
    return sum_normed_by(half.norm, factor, x, residual)


def _product(half: _Half, tokens: Tensor | Quantized) -> Tensor:
    """The merged product of the layers of this half."""
    assert half.siblings is not None
    if isinstance(tokens, Quantized):
        return half.siblings.whole_of_tokens(tokens, True)
    return half.siblings.whole_of_values(tokens)


def _project(down: Any, activate: Callable[[Tensor], Tensor], product: Tensor) -> Tensor:
    """A gated MLP from the product of gate and up on."""
    has_kernel = activate is nn.functional.silu and measure_of(down) is not None
    if has_kernel and quantises(down, product.chunk(2, -1)[0]):
        return multiply(down, activated(product, down, True), True)
    return down.forward(gated(activate, product))  # type: ignore[no-any-return]


def chain_(model: nn.Module) -> None:
    """Chain the steps of decoder layers that are neighbours in a list of modules."""
    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        chain: list[Step] = []
        for block in module:
            forward = vars(block).get("forward")
            arguments = forward.args if isinstance(forward, partial) else ()
            step = next((each for each in arguments if isinstance(each, Step)), None)
            if step is None:
                chain = []
                continue
            chain.append(step)
            step.chain, step.index = chain, len(chain) - 1


def is_made_of(
    block: Any, around: tuple[tuple[str, ...], tuple[str, ...]], ours: tuple[Callable[..., Any], ...]
) -> bool:
    """Whether a decoder layer with norms of these names (see `forms.NORMS_AROUND`) may have a `Step`: its modules
    have these functions as ``forward``: attention, MLP and any of the norms."""
    attention, _, *norms = ours
    held = [getattr(block, name) for names in around for name in names]
    return _is(block.self_attn, attention) and all(any(_is(each, norm) for norm in norms) for each in held)


def _is(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Whether the instance `module` has this ``forward``."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is function and forward.args[0] is module
