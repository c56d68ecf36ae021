"""End-to-end tuning: train the scales and norms of a quantised model to minimise its divergence from the original.

The codes do not change (EfficientQAT's second phase, Chen et al., arXiv 2407.11062), so the checkpoint keeps its size
and format. The loss is ``KL(teacher || model)`` on calibration text. Rounding (also of scales to the checkpoint's
type and of activations to int8) is differentiated as the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from epiloq.environment import multiplies_bfloat16
from epiloq.observers import evaluating
from epiloq.quantize.algorithms.trained_scales import Divergence, TrainedScales
from epiloq.quantize.calibration.blocks import parameter_device, without_cache, without_gradients
from epiloq.quantize.calibration.static import dynamic_int8
from epiloq.weights.grid import InputGrid, QuantizedWeight
from epiloq.weights.rounding import check_finite

RATE = 1e-3
"""Peak learning rate of Adam, relative to each scale and norm weight, after `WARMING` steps of linear warm-up."""
WARMING, BETAS = 8, (0.9, 0.95)
CHECKED = 4
"""Windows on which the divergence before and after is measured."""

Inputs = Literal["int8", "int8-azp", "int8-static"]


@dataclass(frozen=True)
class Tuned:
    """The result.

    weights
        By layer, with unchanged codes.
    norms
        The other parameters that were trained, by name.
    before, after
        The divergence in nats per token. They are equal, and nothing is changed, if tuning did not help.
    """

    weights: dict[str, QuantizedWeight]
    norms: dict[str, Tensor]
    before: float
    after: float


@torch.no_grad()
def tune(
    model: nn.Module,
    weights: Mapping[str, QuantizedWeight],
    teacher: nn.Module,
    windows: Sequence[Tensor],
    *,
    steps: int,
    inputs: Inputs | None = None,
    rate: float = RATE,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Tuned:
    """Train scales (of weights, and static ones of inputs) and norms of a language model, which itself is not changed.

    Each step uses one window. The result is that with the smaller divergence before or after training, over at most
    `CHECKED` windows.

    Args:
        model: in float32, as left by `calibrate`: all parameters other than quantised weights are those of the
        result.
        weights: quantised weights by layer name.
        teacher: the floating-point model; called as ``teacher(window).logits``.
        windows: int64 tokens ``[1, n]`` each.
        steps: number of Adam steps.
        inputs: how the layers' inputs are rounded to int8; those with ``weight.inputs`` are static. None does not
        round them.
        advance: called after each step.

    Raises:
        ValueError: no windows, steps or rate out of range, a model not in float32, or a window whose logits are NaN or
            infinite.
    """
    for name, lowest, value in (("windows", 1, len(windows)), ("steps", 0, steps)):
        if value < lowest:
            raise ValueError(f"tune: {name}: expected at least {lowest}, got {value}")
    if not rate > 0:
        raise ValueError(f"tune: rate: expected more than 0, got {rate}")
    other = next((n for n, p in model.named_parameters() if p.dtype != torch.float32), None)
    if other is not None:
        raise ValueError(f"tune: model: expected float32 parameters, got {model.get_parameter(other).dtype} ({other})")
    state = _State(model, weights, inputs)
    with (
        evaluating(model),
        evaluating(teacher),
        without_cache(model),
        without_cache(teacher),
        without_gradients(model),
        state.installed(),
    ):

        def lost(window: Tensor) -> Tensor:
            with state.products():
                with torch.no_grad():
                    wanted = teacher(window.to(parameter_device(teacher))).logits.to(parameter_device(model))
                found = state.logits(window)
            check_finite("logits of the floating-point model", wanted)
            divergence: Tensor = Divergence.apply(found[0], wanted[0])  # type: ignore[no-untyped-call]
            return divergence

        checked = windows[:CHECKED]
        before = sum(float(lost(window)) for window in checked) / len(checked)
        if not math.isfinite(before):
            raise ValueError(f"tune: model: expected logits with a finite divergence, got {before}")
        _descend(state, lost, windows, steps, rate, seed, advance)
        after = sum(float(lost(window)) for window in checked) / len(checked)
    if not after < before:
        return Tuned(dict(weights), {name: p.detach().clone() for name, p in state.norms.items()}, before, before)
    norms = {name: state.norm(name).detach().clone() for name in state.norms}
    return Tuned({name: state.tuned_weight(name) for name in state.layers}, norms, before, after)


def _descend(
    state: _State,
    lost: Callable[[Tensor], Tensor],
    windows: Sequence[Tensor],
    steps: int,
    rate: float,
    seed: int,
    advance: Callable[[], None],
) -> None:
    optimizer = torch.optim.Adam(state.changes(), lr=rate, betas=BETAS)
    draw, order = torch.Generator().manual_seed(seed), list[int]()
    for step in range(steps):
        order = order or torch.randperm(len(windows), generator=draw).tolist()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / WARMING) * (1 - step / steps)
        optimizer.zero_grad()
        with torch.enable_grad():
            lost(windows[order.pop()]).backward()
        optimizer.step()
        advance()


class _State:
    """A model's trained parameters: relative changes of weight and input scales, and of norms' weights."""

    def __init__(self, model: nn.Module, weights: Mapping[str, QuantizedWeight], inputs: Inputs | None) -> None:
        self.model, self.inputs = model, inputs
        self.layers = {n: TrainedScales(value, parameter_device(model)) for n, value in weights.items()}
        self.norms = {n: p for n, p in model.named_parameters() if p.ndim == 1 and n.endswith("norm.weight")}
        self.norm_changes = {n: torch.zeros_like(p, requires_grad=True) for n, p in self.norms.items()}
        found = {n: value.inputs for n, value in weights.items() if value.inputs is not None}
        self.static: dict[str, tuple[InputGrid, Tensor]] = {}
        for name, grid in found.items():
            self.static[name] = self._of_siblings(name, grid)

    def _of_siblings(self, name: str, grid: InputGrid) -> tuple[InputGrid, Tensor]:
        """A layer's input scale with its change, shared by layers of a module with the same scale."""
        parent = name.rpartition(".")[0]
        for other, (known, change) in self.static.items():
            same = torch.equal(known.scale, grid.scale) and torch.equal(known.zero, grid.zero)
            if same and other.rpartition(".")[0] == parent:
                return known, change
        return grid, torch.zeros_like(grid.scale, device=parameter_device(self.model), requires_grad=True)

    def changes(self) -> list[Tensor]:
        """The trained parameters, each once."""
        scales = [layer.change for layer in self.layers.values()]
        inputs = list({id(change): change for _, change in self.static.values()}.values())
        return [*scales, *self.norm_changes.values(), *inputs]

    def tuned_weight(self, name: str) -> QuantizedWeight:
        """A layer's weight with the trained scales."""
        value = self.layers[name].tuned_weight()
        if name not in self.static:
            return value
        grid, change = self.static[name]
        scale = grid.scale * (1 + change.detach().to(grid.scale.device))
        return replace(value, inputs=InputGrid(scale, grid.zero.clone()))

    def norm(self, name: str) -> Tensor:
        return self.norms[name].detach() * (1 + self.norm_changes[name])

    def logits(self, window: Tensor) -> Tensor:
        values = {name: self.norm(name) for name in self.norms}
        found: Tensor = functional_call(self.model, values, (window.to(parameter_device(self.model)),)).logits
        return found

    def products(self) -> AbstractContextManager[object]:
        """The type of products: bfloat16 while training on a CPU that is made for it, otherwise float32.

        Gradients tolerate it, but the divergence that is reported and decides does not, nor do inputs on an int8 grid,
        whose steps bfloat16 barely resolves.
        """
        if not self._rough():
            return nullcontext()
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    def _rough(self) -> bool:
        on_cpu = parameter_device(self.model).type == "cpu"
        return torch.is_grad_enabled() and self.inputs is None and on_cpu and multiplies_bfloat16()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the model's layers multiply by the trained weights, and round their inputs to int8."""
        modules: dict[str, Any] = {name: self.model.get_submodule(name) for name in self.layers}
        before = {name: module.__dict__.get("forward") for name, module in modules.items()}
        for name, module in modules.items():

            def forward(input: Tensor, name: str = name, bias: Tensor | None = module.bias) -> Tensor:
                x = input if self.inputs is None else self._rounded(name, input)
                dtype = torch.bfloat16 if self._rough() else torch.float32
                return self.layers[name].product(x, bias, dtype)

            module.forward = forward
        try:
            yield
        finally:
            for name, module in modules.items():
                module.__dict__.pop("forward", None)
                if before[name] is not None:
                    module.forward = before[name]

    def _rounded(self, name: str, x: Tensor) -> Tensor:
        if name not in self.static:
            flat = x.detach().reshape(-1, x.shape[-1]).contiguous()
            found = dynamic_int8(flat, symmetric=self.inputs == "int8")
            return x + (found.view_as(x) - x).detach()
        grid, change = self.static[name]
        scale, zero = grid.scale.to(x.device) * (1 + change), grid.zero.to(x.device)
        steps = x / scale
        steps = steps + (steps.round() - steps).detach()
        return steps.clamp(-128 - zero, 127 - zero) * scale
