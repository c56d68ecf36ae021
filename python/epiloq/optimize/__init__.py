"""`optimize_`: merges and fuses layers of a quantised transformers model. docs/source_tour.md follows a decode step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from epiloq.nn import Fp4Experts
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.base.w4a8_layer import W4A8Layer
from epiloq.optimize import forms, fused, rotary, structure
from epiloq.optimize.attention import models_by_sdpa
from epiloq.optimize.registered import switch_
from epiloq.optimize.siblings import Alone, Apart, Siblings, reason_against, replaced, siblings_of
from epiloq.optimize.sinks import models_with_sinks
from epiloq.optimize.step import GATED, GATED_IN_ONE, chain_

__all__ = ["Report", "optimize_"]

# Children that read one input, in the order of their rows in the merged layer.
_SIBLINGS = (rotary.ATTENTION, GATED)
# Layers that are one product already, as in Phi-3.
_ALONE = (rotary.ATTENTION_IN_ONE, GATED_IN_ONE)


@dataclass
class Report:
    """Result of `optimize_`: names of modules that were changed, and reasons for those that were not."""

    merged: list[str] = field(default_factory=list)
    """Groups of layers that share one product, as ``model.layers.0.self_attn.{q_proj,k_proj,v_proj}``."""
    fused: list[str] = field(default_factory=list)
    """Modules whose ``forward`` joins passes over memory."""
    left: dict[str, str] = field(default_factory=dict)
    """Modules that look alike and stayed, with the reason."""
    grouped_attention: bool = False
    """Whether attention, of any model within, now reads keys and values once for all query heads that share them."""

    def __str__(self) -> str:
        lines = [f"{len(self.merged)} groups of layers merged, {len(self.fused)} modules fused"]
        for reason, count in Counter(self.left.values()).items():
            names = [name for name, why in self.left.items() if why == reason]
            more = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"left as it is: {names[0]}{more}: {reason}")
        return "\n".join(lines)


def optimize_(model: nn.Module, *, weight_only_below: int | None = None) -> Report:
    """Merge and fuse the quantised layers of `model` in place, so that it runs faster; its state dict does not change.

    - Query, key and value projections, and gate and up projections, become one product each. The layers keep their
      names and parameters; their weights become views of the merged weight.
    - In decoder layers of Llama's form the residual, the norm and the quantiser of the next product run as one kernel.
      So do the activation and the quantiser of the down projection in gated MLPs. This applies to the schemes
      ``w8a8-int8``, ``fp8-token``, ``fp8-block``, ``w4a8-fp8``, ``w4a8-int8``, ``w4a8-mxfp4-fp8`` and
      ``w4a8-nvfp4-fp8``. With other schemes, in eager mode, the residual and the norm are one kernel, and SiLU and the
      multiplication by the gate another. Decode steps of layers of Llama's, Gemma's or GPT-OSS's form are one function
      in eager mode.
    - On a GPU a router of a mixture of experts computes scores, choice and weights in one kernel.
    - During decoding, attention by ``sdpa`` reads keys and values once for all query heads that share them; so does
      GPT-OSS's, whose prompts also use torch's fused attention on a GPU. In attention of Llama's and
      GPT-OSS's form query and key heads are rotated together.

    Forms are recognised by the source of ``forward``, not by class names; modules of other forms are not changed.
    Results equal those of the separate layers, except that norms and activations are rounded once, where the model
    rounds after each step. Calling it again only affects modules added since.

    Args:
        model: a model quantised by `epiloq.quantize_` or opened by transformers with epiloq, in evaluation mode.
        weight_only_below: for ``w4a8-fp8``, ``w4a8-int8``, ``w4a8-mxfp4-fp8`` and ``w4a8-nvfp4-fp8``: value to set on
            each layer (see `epiloq.nn.W4A8Linear`, also for why it is off by default); on an H200 64 is suitable for
            ``w4a8-fp8``, 256 for the others. None does not change the layers.

    Returns:
        A report of what was merged and fused, and what was not and why; it can be printed.

    Raises:
        ValueError: the model is in training mode, or contains no quantised linear layer or expert; or
            `weight_only_below` is negative, or given for a model without `W4A8Linear` and `W4A8Fp4Linear`. The model is
            then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"epiloq.optimize_: model: expected a torch.nn.Module, got {type(model).__name__}")
    if model.training:
        raise ValueError(
            "epiloq.optimize_: model: expected eval mode, got a model in training; call model.eval() first"
        )
    if not any(isinstance(module, (FrozenLinear, Fp4Experts)) for module in model.modules()):
        raise ValueError(
            "epiloq.optimize_: model: expected quantised linear layers, got none; "
            "call epiloq.quantize_(model, scheme) first, or open a quantised checkpoint"
        )
    if weight_only_below is not None:
        _set_weight_only_below(model, weight_only_below)
    report = Report()
    modules = list(model.named_modules())
    for name, module in modules:
        for names in _SIBLINGS:
            _merge(name, module, names, report)
        for (child,) in _ALONE:
            _take_alone(module, child)
    # Children first: a decoder layer depends on its attention and MLP.
    for name, module in reversed(modules):
        _fuse(name, module, report)
    chain_(model)
    attending = [*models_by_sdpa(model, report.left), *models_with_sinks(model, report.left)]
    for each, attention in attending:
        switch_(each, attention)
    report.grouped_attention = bool(attending)
    return report


def _set_weight_only_below(model: nn.Module, below: int) -> None:
    layers = [module for module in model.modules() if isinstance(module, W4A8Layer)]
    if isinstance(below, bool) or not isinstance(below, int) or below < 0:
        raise ValueError(f"epiloq.optimize_: weight_only_below: expected a number of tokens from 0 on, got {below!r}")
    if not layers:
        raise ValueError(
            "epiloq.optimize_: weight_only_below: expected a model with W4A8Linear or W4A8Fp4Linear layers (schemes "
            "w4a8-fp8, w4a8-int8, w4a8-mxfp4-fp8 and w4a8-nvfp4-fp8), got none; leave it out"
        )
    for layer in layers:
        layer.weight_only_below = below


def _merge(name: str, module: nn.Module, names: tuple[str, ...], report: Report) -> None:
    children = [module._modules.get(child) for child in names]
    layers = [child for child in children if child is not None]
    if len(layers) < len(names) or siblings_of(*layers):
        return
    if not any(isinstance(layer, FrozenLinear) for layer in layers):
        if names == rotary.ATTENTION and _are_rotated_in_floating_point(module, layers):
            Apart(layers, names)
        return
    group = f"{name}.{{{','.join(names)}}}" if name else f"{{{','.join(names)}}}"
    reason = reason_against(layers)
    if reason is None and not structure.same_input(type(module), names):
        reason = "its layers are not called with one input"
    if reason is not None:
        report.left[group] = reason
        return
    Siblings(layers, names)
    report.merged.append(group)


def _are_rotated_in_floating_point(module: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether these are torch's own layers, as they are, in attention of a known form."""
    plain = all(type(layer) is nn.Linear for layer in layers) and replaced(layers) is None
    return plain and structure.rotary_form_of(type(module)) is not None


def _take_alone(module: nn.Module, child: str) -> None:
    layer = module._modules.get(child)
    if layer is not None and child in rotary.ATTENTION_IN_ONE and _are_rotated_in_floating_point(module, [layer]):
        if not siblings_of(layer):
            Alone([layer], [child])
        return
    if not isinstance(layer, FrozenLinear) or siblings_of(layer) or reason_against([layer]) is not None:
        return
    if structure.rotary_form_of(type(module)) is not None or structure.has_form(module, forms.GATED_MLP_IN_ONE):
        Alone([layer], [child])


def _fuse(name: str, module: nn.Module, report: Report) -> None:
    forward = fused.replacement(module)
    if forward is None:
        return
    if module._forward_hooks or module._forward_pre_hooks:
        forward = "it has hooks"
    if isinstance(forward, str):
        report.left[name] = forward
        return
    module.forward = forward
    report.fused.append(name)
