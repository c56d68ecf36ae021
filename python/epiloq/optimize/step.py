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
from torch.compiler import is_exporting
from torch.nn.modules import module as torch_module

from epiloq._torch.library import PLAIN, direct
from epiloq.optimize.attention import NAMES, attend_plainly
from epiloq.optimize.guards import are_plain, untouched
from epiloq.optimize.rotary import ATTENTION, CACHES, rotated_heads, with_normed_heads
from epiloq.optimize.siblings import Siblings, member
from epiloq.optimize.tokens import activated, measure_of, multiply, normed, quantises

_GATED = ("gate_proj", "up_proj")
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


class _Half(NamedTuple):
    """A norm, the layers that read it as one product (None: another module does), and whether they may be handed its
    integers."""

    norm: Any
    siblings: Siblings | None
    takes_integers: bool


class _Parts(NamedTuple):
    """A decoder layer's modules, found to be as `optimize_` left them, and what each of them held then."""

    attention: Any
    output: Any
    mlp: Any
    down: Any
    """The MLP's last layer; None if the MLP is called as a module, as a mixture of experts is."""
    counts: list[int]
    """Heads of query, key and value."""
    halves: tuple[_Half, _Half]
    children: dict[str, Any]
    held: list[tuple[dict[str, Any], Any, dict[str, Any]]]


class Step:
    """A decode step of a decoder layer in Llama's form whose attention and norms are fused. So may be the MLP; another
    one, such as a mixture of experts, is called."""

    def __init__(self, block: Any, takes_integers: tuple[bool, bool], ours: tuple[Callable[..., Any], ...]) -> None:
        self._block, self._takes_integers, self._ours = block, takes_integers, ours
        self._heads, self._norms_heads = vars(block.self_attn)["forward"].args[1:3]
        gated: Any = vars(block.mlp)["forward"].args[1:3] if _is(block.mlp, ours[1]) else (None, None)
        self._gated, self._act = gated
        self._parts: _Parts | None = None

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
        if not are_plain(*angles):
            return None
        weights = []
        for half in parts.halves:
            weight = vars(half.norm)["_parameters"].get("weight")
            if type(weight) not in PLAIN or weight.dtype != x.dtype or weight.device != x.device:
                return None
            weights.append(weight)
        product, residual = self._product(parts.halves[0], weights[0], x, None)
        attended = self._attend(parts, product, angles, arguments)
        down = parts.down
        if down is None:
            residual = residual + attended
            result: Tensor = residual + parts.mlp(_normed(parts.halves[1].norm, weights[1], residual))
            return result
        product, residual = self._product(parts.halves[1], weights[1], attended, residual)
        if measure_of(down) is not None and quantises(down, product.chunk(2, -1)[0]):
            return residual + multiply(down, activated(product, down, True), True)
        gate, up = product.chunk(2, -1)
        projected: Tensor = down.forward(nn.functional.silu(gate).mul_(up))
        return residual + projected

    def _checked(self) -> _Parts | None:
        """The modules, unless one is not what it was, or does not compute what its class defines or what is combined
        here."""
        parts = self._parts
        if parts is None:
            parts = self._parts = self._found()
            if parts is None:
                return None
        state = vars(parts.attention)
        # Configurations have a slow __getattribute__ of their own.
        config = object.__getattribute__(state["config"], "__dict__")
        if state["training"] or config.get("_attn_implementation_internal") not in NAMES:
            return None
        if torch_module._has_any_global_hook() or vars(self._block)["_modules"] != parts.children:
            return None
        for state, forward, children in parts.held:
            if state["_forward_hooks"] or state["_forward_pre_hooks"] or state.get("forward") is not forward:
                return None
            if state["_modules"] != children:
                return None
        return parts

    def _found(self) -> _Parts | None:
        block = self._block
        if not _is_made_of(block, self._ours) or _is(block.mlp, self._ours[1]) != (self._gated is not None):
            return None
        attention, mlp = block.self_attn, block.mlp
        norms = block.input_layernorm, block.post_attention_layernorm
        modules = [m for part in (attention, *norms) for m in part.modules()]
        if self._gated is not None:
            modules += mlp.modules()
            if mlp.act_fn is not self._act or not self._gated.unchanged_in(mlp, _GATED):
                return None
        if not self._heads.unchanged_in(attention, ATTENTION):
            return None
        if not all(untouched(m, *self._ours, member) for m in modules):
            return None
        halves = zip(norms, (self._heads, self._gated), self._takes_integers, strict=True)
        first, second = (_Half(*half) for half in halves)
        held = [(vars(m), vars(m).get("forward"), dict(m._modules)) for m in modules]
        counts = [size // attention.head_dim for size in self._heads.sizes]
        down = None if self._gated is None else mlp.down_proj
        return _Parts(attention, attention.o_proj, mlp, down, counts, (first, second), dict(block._modules), held)

    def _product(self, half: _Half, weight: Tensor, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The merged product of ``norm(x + residual)``, and the sum."""
        norm, siblings, takes_integers = half
        assert siblings is not None
        if takes_integers and quantises(siblings.layers[0], x):
            tokens, total = normed(norm, x, residual, siblings.layers[0], True)
            return multiply(siblings.merged(), tokens, True), total
        total = x if residual is None else residual + x
        return siblings.whole_of_values(_normed(norm, weight, total)), total

    def _attend(self, parts: _Parts, product: Tensor, angles: Any, arguments: dict[str, Any]) -> Tensor:
        attention, (cos, sin) = parts.attention, angles
        width, batch, counts = attention.head_dim, product.shape[0], parts.counts
        heads = product.view(batch, 1, -1, width)
        if self._norms_heads:
            heads = with_normed_heads(attention, heads, counts)
        cache = None
        for name in CACHES:  # one of them
            cache = arguments.get(name, cache)
        query, key, value = rotated_heads(heads, counts, cos, sin, cache, attention.layer_idx, True)
        mask = arguments.get("attention_mask")
        attended = attend_plainly(attention, query, key, value, mask, attention.scaling)
        return parts.output.forward(attended.reshape(batch, 1, -1).contiguous())  # type: ignore[no-any-return]


def step_of(block: Any, takes_integers: tuple[bool, bool], ours: tuple[Callable[..., Any], ...]) -> Step | None:
    """The step of a decoder layer whose modules have these functions as ``forward``: attention, MLP and both norms."""
    return Step(block, takes_integers, ours) if _is_made_of(block, ours) else None


def _normed(norm: Any, weight: Tensor, x: Tensor) -> Tensor:
    return torch.rms_norm(x, weight.shape, weight, norm.variance_epsilon)


def _is_made_of(block: Any, ours: tuple[Callable[..., Any], ...]) -> bool:
    attention, _, norm = ours
    norms = block.input_layernorm, block.post_attention_layernorm
    return _is(block.self_attn, attention) and all(_is(each, norm) for each in norms)


def _is(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Whether the instance `module` has this ``forward``."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is function and forward.args[0] is module
