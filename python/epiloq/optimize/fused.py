"""Decoder layers, gated MLPs and norms fused with the quantiser of the next product.

Each function is the ``forward`` of a module that `structure` recognised. The module's own ``forward`` runs if the fused
one is not applicable at run time: a gradient is needed, a submodule was replaced or has hooks, or the call differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from epiloq._torch.tracing import is_exporting
from epiloq.nn.base.prepared_linear import K_MULTIPLE
from epiloq.optimize import forms, structure
from epiloq.optimize.guards import decodes_in_graph, untouched, wants_gradient
from epiloq.optimize.norms import NORMS, fused_norm, rms_norm, sum_normed
from epiloq.optimize.rotary import ATTENTION, ATTENTION_IN_ONE, rotary_attention
from epiloq.optimize.routers import fused_router
from epiloq.optimize.siblings import Siblings, siblings_of
from epiloq.optimize.step import GATED, GATED_IN_ONE, SILU, Step, act_of, activation_of, is_made_of
from epiloq.optimize.tokens import activated, gated, measure_of, multiply, normed, quantises


def replacement(module: Any) -> Callable[..., Any] | str | None:
    """A faster ``forward`` for `module`, or the reason why a similar module has none, or None."""
    if (forward := fused_norm(module) or fused_router(module)) is not None:
        return forward
    for form, names in ((forms.GATED_MLP, GATED), (forms.GATED_MLP_IN_ONE, GATED_IN_ONE)):
        if structure.has_form(module, form):
            siblings = group_of(module, names)
            if siblings is None or len({*siblings.sizes}) != 1:
                return None
            return partial(gated_mlp, module, siblings, act_of(module))
    if "forward" not in vars(module) and (rotary := structure.rotary_form_of(type(module))) is not None:
        siblings = group_of(module, ATTENTION) or group_of(module, ATTENTION_IN_ONE)
        return None if siblings is None else partial(rotary_attention, module, siblings, rotary)
    around = structure.norms_around(module)
    return None if around is None else _decoder(module, around)


def _decoder(module: Any, around: tuple[tuple[str, ...], tuple[str, ...]]) -> Callable[..., Any] | str | None:
    norms = [getattr(module, name) for names in around for name in names]
    other = [type(norm).__name__ for norm in norms if not _is_fused(norm, *NORMS)]
    if other:
        return f"norms of another form ({other[0]})"
    attention = ((module.self_attn, norms[0]), _reader(module.self_attn, norms[0], ATTENTION, ATTENTION_IN_ONE))
    mlp = ((module.mlp, norms[-1]), _reader(module.mlp, norms[-1], GATED, GATED_IN_ONE))
    ours = (rotary_attention, gated_mlp, *NORMS)
    has_step = is_made_of(module, around, ours)
    if not structure.has_form(module, forms.SANDWICH_DECODER):
        parameters = inspect.signature(type(module).forward).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        takes_quantized = attention[1] is not None, mlp[1] is not None
        step = PreNormStep(attention, module, around, takes_quantized, ours) if has_step else None
        return partial(pre_norm_decoder, module, defaults, attention, mlp, step)
    return partial(sandwich_decoder, module, Step(module, around, (False, False), ours)) if has_step else None


def _is_fused(module: nn.Module, *ours: Callable[..., Any]) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func in ours


def group_of(module: nn.Module, names: tuple[str, ...]) -> Siblings | None:
    """The merged children of a module, or None."""
    children = [child for name in names if (child := module._modules.get(name)) is not None]
    return siblings_of(*children) if len(children) == len(names) else None


def _reader(module: nn.Module, norm: nn.Module, *choices: tuple[str, ...]) -> Siblings | None:
    """The layers to which a module passes its input, if it does nothing else with it and they accept it quantised by
    the kernel of `norm`."""
    if not _is_fused(norm, rms_norm):
        return None
    siblings = next((found for names in choices if (found := group_of(module, names)) is not None), None)
    if siblings is None:
        return None
    first: Any = siblings.layers[0]
    if measure_of(first) is None or first.in_features % K_MULTIPLE:
        return None
    argument = list(inspect.signature(type(module).forward).parameters)[1]
    return siblings if structure.only_projects(type(module), argument, siblings.names) else None


def gated_mlp(mlp: Any, siblings: Siblings, act: nn.Module, x: Tensor) -> Tensor:
    """``down(act(gate(x)) * up(x))``: one product for gate and up, SiLU with the quantiser of down."""
    stands = act_of(mlp) is act and untouched(act) and siblings.unchanged_in(mlp)
    if not stands or wants_gradient(x) or is_exporting():
        return type(mlp).forward(mlp, x)  # type: ignore[no-any-return]
    gate_up, down = siblings.whole(x), mlp.down_proj
    has_kernel = type(act).__name__ in SILU and measure_of(down) is not None and untouched(down)
    if not has_kernel or not quantises(down, gate_up.chunk(2, -1)[0]):
        return down(gated(activation_of(act), gate_up))  # type: ignore[no-any-return]
    return multiply(down, activated(gate_up, down))


_NormReader = tuple[tuple[nn.Module, nn.Module], Siblings | None]
"""A module of a decoder layer, the norm before it, and its layers that take the norm's output quantised, or None."""


class PreNormStep(Step):
    """The step of a `pre_norm_decoder`. A graph calls the layer's modules instead, but there, too, the layer before
    computes the sum and this layer's first norm of it in one kernel."""

    def __init__(self, first: _NormReader, *arguments_of_step: Any) -> None:
        super().__init__(*arguments_of_step)
        self._first = first
        self._in_graph: tuple[Tensor, Tensor] | None = None
        """While a graph is made: a sum and its norm, which the layer before computed for this one."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_in_graph": None}

    def may_prepare_in_graph(self, x: Tensor) -> bool:
        """Whether a graph of a decode step is made, and this layer is on the device of `x`, the output before it."""
        return decodes_in_graph(x) and self._block.input_layernorm.weight.device == x.device

    def prepared_in_graph(self, x: Tensor, residual: Tensor) -> Tensor:
        """``x + residual``, of which this layer will find its norm prepared."""
        normed_sum, total = _first_normed(self._block, self._first, x, residual)
        self._in_graph = total, normed_sum
        return total

    def taken_in_graph(self, x: Tensor) -> Tensor | None:
        """The first norm of `x` if the layer before prepared it."""
        if not is_compiling():
            return None
        held, self._in_graph = self._in_graph, None
        return held[1] if held is not None and held[0] is x else None


def pre_norm_decoder(
    block: Any,
    defaults: dict[str, Any],
    first: _NormReader,
    second: _NormReader,
    step: PreNormStep | None,
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """``h = x + attention(norm(x)); h + mlp(norm(h))``: the addition, the norm and the next quantiser as one."""
    if step is not None and not args and (result := step(hidden_states, kwargs)) is not None:
        return result
    if args or wants_gradient(hidden_states) or not all(map(_is_idle, _dropouts_of(block))):
        return type(block).forward(block, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
    x = None if step is None else step.taken_in_graph(hidden_states)
    if x is None:
        x, _ = _first_normed(block, first, hidden_states, None)
    attention = block.self_attn
    attended, _ = attention(hidden_states=x, **{**defaults, **kwargs})
    mlp, norm = block.mlp, block.post_attention_layernorm
    x, residual = _normed(norm, attended, hidden_states, _quantized_reader(mlp, norm, second))
    projected = mlp(x)
    if isinstance(projected, tuple):  # with its router's scores
        projected = projected[0]
    following = None if step is None else step.following
    if not isinstance(following, PreNormStep) or not following.may_prepare_in_graph(projected):
        return residual + projected  # type: ignore[no-any-return]
    return following.prepared_in_graph(projected, residual)


def _first_normed(block: Any, first: _NormReader, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)`` of a layer's first norm."""
    norm = block.input_layernorm
    return _normed(norm, x, residual, _quantized_reader(block.self_attn, norm, first))


def sandwich_decoder(block: Any, step: Step, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A decoder layer with norms after attention and MLP, whose decode steps are one function."""
    if not args and (result := step(hidden_states, kwargs)) is not None:
        return result
    return type(block).forward(block, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]


def _dropouts_of(block: nn.Module) -> list[nn.Module]:
    return [block._modules[name] for name in forms.DROPOUTS if name in block._modules]  # type: ignore[misc]


def _is_idle(dropout: nn.Module) -> bool:
    return isinstance(dropout, nn.Dropout) and not dropout.training and untouched(dropout)


def _quantized_reader(module: nn.Module, norm: nn.Module, given: _NormReader) -> Siblings | None:
    """The layers that accept a norm's quantised output, if nothing else reads it."""
    parts, reader = given
    if reader is None or is_exporting() or parts[0] is not module or parts[1] is not norm:
        return None
    seen = untouched(module, gated_mlp, rotary_attention) and untouched(norm, rms_norm)
    return reader if seen and reader.unchanged_in(module) else None


def _apart(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype != x.dtype or wants_gradient(x, weight)


def _normed(norm: Any, x: Tensor, residual: Tensor | None, reader: Siblings | None) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)``, with the norm quantised if there are readers for it."""
    if reader is None or _apart(norm.weight, x) or not quantises(reader.layers[0], x):
        if residual is None:
            return norm(x), x
        if untouched(norm, *NORMS) and (both := sum_normed(norm, x, residual)) is not None:
            return both
        total = residual + x
        return norm(total), total
    tokens, total = normed(norm, x, residual, reader.layers[0])
    return reader.hand(tokens), total
