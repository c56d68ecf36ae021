"""ExpertLinears: the experts of a layer as separate linear layers, and the routing of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from epiloq._torch.calls import reads_values
from epiloq._torch.tracing import is_exporting, is_jit_tracing
from epiloq.nn.base.frozen import wants_gradient
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.experts.gating import gated
from epiloq.ops.experts.rows import (
    COLUMN_MULTIPLE,
    MOST_EXPERTS,
    MOST_GATHERED_COLUMNS,
    MOST_SORTED_ROWS,
    combine_expert_rows,
    gather_expert_rows,
    sort_expert_rows,
)


class Projections(NamedTuple):
    """Names of an expert's matrices in checkpoints; `gate` is empty if there is no such matrix."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @classmethod
    def of(cls, names: Sequence[str]) -> Projections:
        """Create from the names of an expert's two or three matrices, in this order."""
        return cls(*names) if len(names) == len(cls._fields) else cls("", *names)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the matrices that exist."""
        return tuple(name for name in self if name)


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_routing(
    name: str, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, hidden: int | None, experts: int
) -> None:
    """Check the inputs of the experts called `name`; values of expert indices only where this needs no synchronisation.

    `hidden` is None if the width of the layers is unknown.
    """
    if hidden_states.dim() != 2 or (hidden is not None and hidden_states.shape[1] != hidden):
        wanted = "H" if hidden is None else hidden
        raise ValueError(f"{name}: hidden_states: expected shape [T, {wanted}], got {list(hidden_states.shape)}")
    tokens = hidden_states.shape[0]
    for argument, tensor in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
        _check_kind(name, argument, tensor)
        if tensor.dim() != 2 or tensor.shape[0] != tokens or tensor.shape[1] != top_k_index.shape[1]:
            shapes = f"{list(top_k_index.shape)} and {list(top_k_weights.shape)}"
            raise ValueError(
                f"{name}: {argument}: expected top_k_index and top_k_weights of [{tokens}, top_k], got {shapes}"
            )
    if top_k_index.device.type == "cpu" and top_k_index.numel() > 0 and reads_values(top_k_index):
        low, high = (int(end) for end in top_k_index.aminmax())
        if low < 0 or high >= experts:
            raise ValueError(f"{name}: top_k_index: expected indices from 0 to {experts - 1}, got {low} to {high}")


def _check_kind(name: str, argument: str, given: Any) -> None:
    """Raise TypeError unless indices are integers and weights are not: swapped, they would be truncated in silence."""
    is_index = argument == "top_k_index"
    kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
    if not isinstance(given, Tensor) or not (kind in INTEGERS if is_index else given.is_floating_point()):
        wanted = "integers" if is_index else "floating-point numbers"
        raise TypeError(f"{name}: {argument}: expected a tensor of {wanted}, got {kind}")


def _numbered(top_k_index: Tensor, experts: int, part: range | None) -> Tensor:
    """Numbers of experts within `part`; `experts` for those of other processes."""
    if part is None:
        return top_k_index
    here = (top_k_index >= part.start) & (top_k_index < part.stop)
    return torch.where(here, top_k_index - part.start, experts)


def _by_kernel(top_k_index: Tensor, experts: int) -> bool:
    """Whether one kernel sorts rows by these experts."""
    takes = top_k_index.is_cuda and top_k_index.dtype == torch.int64 and experts <= MOST_EXPERTS
    # An exported program takes any number of tokens, which must not choose a kernel while it is traced.
    return takes and not is_exporting() and top_k_index.numel() <= MOST_SORTED_ROWS


Quantise = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Routing:
    """Assignment of T tokens to top_k experts each. Rows are pairs of a token and one of its experts.

    tokens
        int64 ``[T top_k]``: the token of each row, sorted by expert.
    places
        int64 ``[T top_k]``: where each row, in the order of ``top_k_index.flatten()``, is among the sorted ones.
    ends
        int32 ``[E]``: the ends of the experts' sorted rows, as for ``epiloq.grouped_mm``.
    partial
        Whether rows for experts in other processes follow; their values are not read.
    """

    tokens: Tensor
    places: Tensor
    ends: Tensor
    partial: bool = False

    @classmethod
    def of(cls, top_k_index: Tensor, experts: int, part: range | None = None) -> Routing:
        """Create from the indices ``[T, top_k]`` of each token's experts; `part` selects the experts in this process.

        Nothing is read back to the host. On a GPU one kernel sorts up to `MOST_SORTED_ROWS` rows.
        """
        top_k_index = _numbered(top_k_index, experts, part)
        if _by_kernel(top_k_index, experts):
            _, tokens, places, ends = sort_expert_rows(top_k_index.contiguous(), experts)
            return cls(tokens, places, ends, part is not None)
        expert, order = top_k_index.flatten().sort(stable=True)
        numbers = torch.arange(experts, device=expert.device, dtype=expert.dtype)
        return cls(
            order.div(top_k_index.shape[1], rounding_mode="floor"),
            torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device)),
            torch.searchsorted(expert, numbers, right=True, out_int32=True),
            part is not None,
        )

    @classmethod
    def gather(
        cls,
        x: Tensor,
        top_k_index: Tensor,
        experts: int,
        part: range | None,
        quantise: Quantise | None = None,
        measure: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[Routing, Tensor, Tensor | None]:
        """Create as `of` does; also return the tokens ``[T, H]`` as rows ``[T top_k, H']`` sorted by expert, and their
        scales.

        Rows are quantised by `quantise`, if there is one; `measure` are the options by which ``gather_expert_rows``
        does the same in the kernel that sorts.
        """
        fits = x.shape[1] % COLUMN_MULTIPLE == 0 and x.shape[1] <= MOST_GATHERED_COLUMNS and not wants_gradient(x)
        if fits and x.dtype in (torch.float16, torch.bfloat16) and _by_kernel(top_k_index, experts):
            index = _numbered(top_k_index, experts, part).contiguous()
            q, scale, tokens, places, ends = gather_expert_rows(x.contiguous(), index, experts, **measure)
            return cls(tokens, places, ends, part is not None), q, scale if measure else None
        routing = cls.of(top_k_index, experts, part)
        q, found = (x, None) if quantise is None else quantise(x.contiguous())
        return routing, *gathered(q, found, routing.tokens, measure.get("scale_layout") == "column")

    def combined(self, y: Tensor, top_k_weights: Tensor) -> Tensor:
        """Combine rows ``[T top_k, H]``, sorted by expert, to tokens' weighted sums ``[T, H]``, in order and fp32."""
        if y.is_cuda and not wants_gradient(y, top_k_weights):
            weights = top_k_weights if top_k_weights.dtype == y.dtype else top_k_weights.float()
            return combine_expert_rows(y, self.places, weights.contiguous(), self.ends[-1:] if self.partial else None)
        if self.partial:
            rows = torch.arange(y.shape[0], device=y.device).unsqueeze(-1)
            y = y.masked_fill(rows >= self.ends[-1], 0)
        return weighted_sums(y[self.places].view(*top_k_weights.shape, y.shape[-1]), top_k_weights)


def weighted_sums(each: Tensor, top_k_weights: Tensor) -> Tensor:
    """``[T, H]`` of each token's rows ``[T, top_k, H]``, in fp32 and in order."""
    # 16-bit rows times float32 weights give float32 in one pass.
    return (each * top_k_weights.float().unsqueeze(-1)).sum(1).to(each.dtype)


def gathered(q: Tensor, scale: Tensor | None, rows: Tensor, column: bool) -> tuple[Tensor, Tensor | None]:
    """Gather rows and their scales, keeping the layout of the scales."""
    if scale is None:
        return q[rows], None
    # float8 is gathered as bytes, because some backends cannot gather it; TorchScript has no views of another type.
    as_bytes = q.dtype != torch.int8 and not is_jit_tracing()
    taken = q.view(torch.uint8)[rows].view(q.dtype) if as_bytes else q[rows]
    if not column:
        return taken, scale[rows]
    filled = functional.pad(rows, (0, -rows.shape[0] % 4))
    return taken, scale.t()[:, filled].t()[: rows.shape[0]]


class ExpertLinears(nn.Module):
    """Experts with a separate layer per matrix: ``sum_j w_j down_e(act(gate_e(x)) * up_e(x))``, e = index_j.

    Without gate_e it is ``down_e(act(up_e(x)))``. An ``OwnGate`` as `act_fn` combines both itself.

    It has the interface of transformers' experts: ``hidden_states`` ``[T, H]``, ``top_k_index`` ``[T, top_k]`` and
    ``top_k_weights`` ``[T, top_k]`` give ``[T, H]``. Its layers have the names used in checkpoints, ``7.gate_proj`` (or
    those of `experts`: gate, up and down, or up and down, in this order), and may be of any kind, quantised or not.
    Each call reads the number of rows of each expert on the host; ``GatedExperts`` does not. A program that
    ``torch.export`` or ``torch.jit.trace`` records cannot: there each expert multiplies all tokens, with zeros for
    those of others. Raises ValueError for other shapes, and for invalid expert indices (not checked on a GPU).

    identities
        Number of experts after those with layers that return their tokens (LongCat's zero experts).
    post_expert_norm
        A module applied to each expert's output before the weighted sum, or None.
    part, whole
        The range of experts in this process and their total number, under expert parallelism: see
        ``epiloq.parallel``.
    """

    part: range | None = None
    whole: int | None = None
    before: nn.Module | None = None
    """The module with stacked matrices that was taken apart, if any; no child, so that its tensors are not counted."""

    def __init__(
        self,
        experts: Sequence[Mapping[str, nn.Module]],
        act_fn: nn.Module,
        *,
        identities: int = 0,
        post_expert_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.experts, self.projections = len(experts), Projections.of(tuple(experts[0]))
        for number, layers in enumerate(experts):
            self.add_module(str(number), nn.ModuleDict(layers))
        self.act_fn, self.identities, self.post_expert_norm = act_fn, identities, post_expert_norm

    def __getattr__(self, name: str) -> Any:
        """A parameter of the module that was taken apart: models initialise such from a parent (Qwen3-Omni)."""
        if self.before is not None and name in self.before._parameters:
            return self.before._parameters[name]
        return super().__getattr__(name)

    def others(self, experts: Sequence[Mapping[str, nn.Module]]) -> ExpertLinears:
        """Create a layer with other experts and the same settings."""
        own = {"identities": self.identities, "post_expert_norm": self.post_expert_norm}
        return ExpertLinears(experts, self.act_fn, **own).train(self.training)  # type: ignore[arg-type]

    def layers(self, expert: int) -> tuple[nn.Module, ...]:
        """Return an expert's layers: gate, up and down, or up and down."""
        found = cast(nn.ModuleDict, self.get_submodule(str(expert)))
        return tuple(found[name] for name in self.projections.names)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if is_symbolic(hidden_states):
            return as_leaf(self, hidden_states, top_k_index, top_k_weights)
        hidden = getattr(self.layers(0)[0], "in_features", None)
        count = self.whole or self.experts
        check_routing("ExpertLinears", hidden_states, top_k_index, top_k_weights, hidden, count + self.identities)
        if is_exporting():
            y = weighted_sums(self._of_all_tokens(hidden_states, top_k_index), top_k_weights)
            return with_identities(self, y, hidden_states, top_k_index, top_k_weights)
        routing = Routing.of(top_k_index, self.experts, own_part(self))
        ends = routing.ends.tolist()
        rows, parts = hidden_states[routing.tokens], []
        for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if begin < end:
                parts.append(self._expert(expert, rows[begin:end]))
        y = torch.cat(parts) if parts else rows[:0]
        if y.shape[0] < rows.shape[0]:
            y = torch.cat((y, torch.zeros_like(rows[y.shape[0] :])))
        return with_identities(self, routing.combined(y, top_k_weights), hidden_states, top_k_index, top_k_weights)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        *first, down = self.layers(expert)
        y: Tensor = down(gated(self.act_fn, *(layer(x) for layer in first)))
        return y if self.post_expert_norm is None else self.post_expert_norm(y)

    def _of_all_tokens(self, hidden_states: Tensor, top_k_index: Tensor) -> Tensor:
        """Rows ``[T, top_k, H]``; zeros for experts without layers in this process."""
        part, each = own_part(self), hidden_states.new_zeros(())
        for expert in range(self.experts):
            chosen = top_k_index == expert + (0 if part is None else part.start)
            # What is measured over all tokens, such as one scale for them, is measured over the expert's.
            y = self._expert(expert, hidden_states.masked_fill(~chosen.any(1, keepdim=True), 0))
            each = torch.where(chosen.unsqueeze(-1), y.unsqueeze(1), each.to(y.dtype))
        return each


def own_part(module: Any) -> range | None:
    """The range of experts in this process; None for all."""
    if module.part is None and module.identities:
        return range(module.experts)
    part: range | None = module.part
    return part


def with_identities(
    module: Any, y: Tensor, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Add to the weighted sums `y` those of the experts that return their tokens, in one process only."""
    if not module.identities or (module.part is not None and module.part.start > 0):
        return y
    weights = top_k_weights.float().masked_fill(top_k_index < (module.whole or module.experts), 0).sum(1, keepdim=True)
    return (y.float() + hidden_states.float() * weights).to(y.dtype)
