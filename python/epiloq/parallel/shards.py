"""Sharding of a quantised linear layer by rows or columns, and joining of shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from epiloq._torch.parameters import FrozenParameter
from epiloq.formats.epiloq_modules import Options
from epiloq.parallel.blocked_tensors import BlockedTensor, cut_of, options_of

# Group size in column shards of a layer in activation order, whose groups are split among shards.
_SUBGROUP = 32
_BIAS = "bias_of_sum"
_HOOKS = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules", "training"}


@dataclass(frozen=True)
class Shard:
    """Position of a shard in its layer, stored as the layer's attribute ``shard``.

    rows, columns
        Ranges in the whole weight, whose shape is ``[out_features, in_features]``.
    head, tail, above
        Zero columns before and after the input that keep the boundaries of scale groups, and the rows of the layer
        above the shard's first that share its scales.
    """

    out_features: int
    in_features: int
    rows: range
    columns: range
    options: Options
    head: int = 0
    tail: int = 0
    above: int = 0
    order: Tensor | None = None
    """The activation order of the whole weight."""


def part_of(size: int, rank: int, parts: int) -> range:
    """Range of rows or columns out of `size` for a rank, as by ``torch.chunk``: the last ranks may have fewer."""
    length = -(-size // parts)
    return range(min(size, rank * length), min(size, (rank + 1) * length))


@torch.no_grad()
def shard_rows(layer: nn.Module, begin: int, end: int) -> nn.Module:
    """Create a layer of the output features `begin` to `end` of a quantised linear layer, with their bias.

    Given the whole input ``[…, in_features]`` it returns these columns of the output, ``[…, end - begin]``,
    bit-identical if products are exact sums. The original layer is not changed. Raises ValueError unless it is one of
    epiloq's quantised linear layers and not a shard, and for invalid rows.
    """
    return _shard(layer, range(begin, end), None)


@torch.no_grad()
def shard_columns(layer: nn.Module, begin: int, end: int) -> nn.Module:
    """Create a layer of the input features `begin` to `end` of a quantised linear layer, without its bias.

    Given the input's columns ``[…, end - begin]`` it returns a summand ``[…, out_features]`` of the output; the bias
    is the shard's `bias_of_sum`, to be added once to the sum. Dynamic activation scales are computed from these
    columns only, so they are at most those of the whole token. If the shard starts inside a scale group it keeps the
    group's scale, and the input is padded with zeros. The original layer is not changed. Raises ValueError as
    `shard_rows` does.
    """
    return _shard(layer, None, range(begin, end))


def _shard(layer: Any, rows: range | None, columns: range | None) -> nn.Module:
    made, bias = _cut(layer, rows, columns)
    _finish(made, bias, columns is not None)
    install(made)
    return cast(nn.Module, made.train(layer.training))


def shard_(layer: Any, rows: range | None, columns: range | None) -> None:
    """Convert a layer to a shard in place, keeping its hooks."""
    made, bias = _cut(layer, rows, columns)
    _finish(made, bias, columns is not None)
    vars(layer).update({name: value for name, value in vars(made).items() if name not in _HOOKS | {"training"}})


def _cut(layer: Any, rows: range | None, columns: range | None) -> tuple[Any, Tensor | None]:
    cut = cut_of(layer)
    if getattr(layer, "shard", None) is not None:
        raise ValueError("epiloq.parallel: layer: expected a whole layer, got a shard of one")
    n, k, options = layer.out_features, layer.in_features, options_of(layer)
    for name, given, size in (("rows", rows, n), ("columns", columns, k)):
        if given is not None and not 0 <= given.start < given.stop <= size:
            raise ValueError(
                f"epiloq.parallel: {name}: expected some of 0 to {size}, got {given.start} to {given.stop}"
            )
    rows, columns = rows or range(n), columns or range(k)
    blocked = cut.take(layer)
    order, bias = getattr(layer, "weight_perm", None), layer._stored("bias")
    bias = None if bias is None else bias.detach().clone()
    step_rows = math.lcm(*(p.rows for p in blocked.values() if p.rows))
    first = rows.start // step_rows * step_rows
    whole_columns = len(columns) == k
    if order is not None and not whole_columns:
        tensors, group = _reordered(blocked, order, columns, layer.group_size)
        width = tensors["q"].shape[1]
        made = cut.make(layer, tensors, n, width, {**options, "group_size": group})
        _place_in_layer(
            made, Shard(n, k, rows, columns, options, tail=width - len(columns), order=order.detach().clone())
        )
        return made, bias
    step = math.lcm(*(p.columns for p in blocked.values() if p.columns))
    left = columns.start // step * step
    right = min(k, -(-columns.stop // step) * step) if cut.tail else columns.stop
    found = {name: _slice(block, range(first, rows.stop), range(left, right)) for name, block in blocked.items()}
    if order is not None:
        found["perm"] = order.detach().clone()
    made = cut.make(layer, found, rows.stop - first, right - left, options)
    gaps: dict[str, Any] = {"head": columns.start - left, "tail": right - columns.stop, "above": rows.start - first}
    _place_in_layer(made, Shard(n, k, rows, columns, options, **gaps))
    if bias is not None and not whole_columns:
        return made, bias
    return made, None if bias is None else bias[first : rows.stop]


def _place_in_layer(made: Any, shard: Shard) -> None:
    """Tell a shard which part it is, so that its weight is that part, whatever else it has for the kernels."""
    made.shard = shard
    if shard.head or shard.tail or shard.above:
        rows = range(shard.above, shard.above + len(shard.rows))
        made._own = rows, range(shard.head, shard.head + len(shard.columns))


def _finish(made: Any, bias: Tensor | None, of_sum: bool) -> None:
    if of_sum:
        made.register_parameter(_BIAS, None if bias is None else FrozenParameter(bias))
    elif bias is not None:
        made._store("bias", bias)
    made._settle()


def _slice(block: BlockedTensor, rows: range, columns: range) -> Tensor:
    found = block.tensor.detach()
    if block.rows:
        found = found[rows.start // block.rows : -(-rows.stop // block.rows)]
    if block.columns:
        found = found[:, columns.start // block.columns : -(-columns.stop // block.columns)]
    return found.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Slots:
    """Positions of columns in activation order in a shard of input features.

    Each group's columns fill subgroups of `length`: the positions `kept` of the whole order go to `places` of
    `width`, and the subgroups have the scales of `groups`.
    """

    kept: Tensor
    places: Tensor
    groups: Tensor
    width: int
    length: int

    @classmethod
    def of(cls, order: Tensor, columns: range, group_size: int) -> _Slots:
        kept = ((order >= columns.start) & (order < columns.stop)).nonzero().flatten()
        if group_size == -1:
            return cls(kept, torch.arange(len(kept), device=order.device), kept.new_zeros(1), len(kept), -1)
        length, group = min(group_size, _SUBGROUP), kept // group_size
        count = torch.bincount(group, minlength=-(-len(order) // group_size))
        subgroups = -(-count // length)
        begins, first = (subgroups.cumsum(0) - subgroups) * length, count.cumsum(0) - count
        places = begins[group] + torch.arange(len(kept), device=order.device) - first[group]
        groups = torch.repeat_interleave(subgroups)
        return cls(kept, places, groups, len(groups) * length, length)


def _reordered(
    blocked: Mapping[str, BlockedTensor], order: Tensor, columns: range, group_size: int
) -> tuple[dict[str, Tensor], int]:
    slots = _Slots.of(order, columns, group_size)
    q = blocked["q"].tensor
    wide = q.new_zeros((q.shape[0], slots.width))
    wide[:, slots.places] = q[:, slots.kept]
    perm = torch.full((slots.width,), -1, dtype=torch.int64, device=q.device)
    perm[slots.places] = order[slots.kept] - columns.start
    empty = perm == -1
    perm[empty] = torch.arange(len(columns), slots.width, device=q.device)
    rest = {name: p.tensor[:, slots.groups].contiguous() for name, p in blocked.items() if name != "q"}
    return {"q": wide, "perm": perm, **rest}, slots.length


def padded_input(shard: Shard, x: Tensor) -> Tensor:
    """Pad the input of a shard with zeros. Raises ValueError for another width."""
    if x.dim() == 0 or x.shape[-1] != len(shard.columns):
        raise ValueError(
            f"epiloq.parallel: x: expected shape […, {len(shard.columns)}], the input features {shard.columns.start} "
            f"to {shard.columns.stop}, got {list(x.shape)}"
        )
    return functional.pad(x, (shard.head, shard.tail)) if shard.head or shard.tail else x


def install(layer: nn.Module, pads: bool = True) -> None:
    """Make a shard pad its input if necessary, and drop the rows above its own."""
    if pads:
        layer.register_forward_pre_hook(_before)
    layer.register_forward_hook(_after)


def _before(layer: Any, inputs: tuple[Any, ...]) -> Any:
    return (padded_input(layer.shard, inputs[0]), *inputs[1:])


def _after(layer: Any, inputs: Any, y: Tensor) -> Tensor:
    return y[..., layer.shard.above :].contiguous() if layer.shard.above else y


def bare(layer: nn.Module) -> nn.Module:
    """Return a shard without hooks, on the CPU, for sending."""
    found = type(layer).__new__(type(layer))
    nn.Module.__init__(found)
    vars(found).update({name: value for name, value in vars(layer).items() if name not in _HOOKS and name != "forward"})
    vars(found)["_parameters"] = {
        name: None if t is None else FrozenParameter(t.detach().cpu()) for name, t in layer._parameters.items()
    }
    vars(found)["_held"] = None
    return found


@torch.no_grad()
def join(shards: Sequence[Any]) -> nn.Module:
    """Join shards, which may overlap but must cover everything, to a whole layer on the first one's device.

    Its tensors equal those of the original layer bit for bit. Raises ValueError unless the layers are shards of the
    same layer that cover all rows and columns.
    """
    for layer in shards:
        if not isinstance(getattr(layer, "shard", None), Shard):
            wanted, got = "results of shard_rows or shard_columns", type(layer).__name__
            raise ValueError(f"epiloq.parallel.join: shards: expected {wanted}, got {got}")
    if not shards:
        raise ValueError("epiloq.parallel.join: shards: expected at least one, got none")
    first: Shard = shards[0].shard
    n, k, options = first.out_features, first.in_features, first.options
    missing = _missing([each.shard for each in shards])
    if missing or any((s.shard.out_features, s.shard.in_features, s.shard.options) != (n, k, options) for s in shards):
        raise ValueError(f"epiloq.parallel.join: shards: expected all shards of one layer [{n}, {k}]{missing}")
    cut, device = cut_of(shards[0]), shards[0].weight_q.device
    whole: dict[str, Tensor] = {}
    for layer in shards:
        shard: Shard = layer.shard
        for name, block in cut.take(layer).items():
            given = block.tensor.to(device)
            if shard.order is not None:
                _put_back(whole, name, given, shard, options["group_size"])
            else:
                _place(whole, name, block._replace(tensor=given), shard)
    order = first.order if first.order is not None else getattr(shards[0], "weight_perm", None)
    if order is not None:
        whole["perm"] = order.to(device)
    like = shards[0].__class__.__new__(shards[0].__class__)
    vars(like).update(vars(shards[0]))
    like.out_features, like.in_features = n, k
    made = cut.make(like, whole, n, k, options)
    bias = getattr(shards[0], _BIAS, None)
    if bias is None and shards[0].bias is not None:
        bias = shards[0].bias.new_empty(n)
        for layer in shards:
            bias[layer.shard.rows.start : layer.shard.rows.stop] = layer.bias[layer.shard.above :].to(device)
    if bias is not None:
        made._store("bias", bias.detach().clone())
    made._settle()
    return cast(nn.Module, made.train(shards[0].training))


def _missing(shards: Sequence[Shard]) -> str:
    for what, size in (("rows", shards[0].out_features), ("columns", shards[0].in_features)):
        end = 0
        for given in sorted((getattr(shard, what) for shard in shards), key=lambda given: given.start):
            if given.start > end:
                break
            end = max(end, given.stop)
        if end < size:
            return f", but {what} from {end} are missing"
    return ""


def _place(whole: dict[str, Tensor], name: str, block: BlockedTensor, shard: Shard) -> None:
    """Copy a shard's tensor to its position in the whole layer's."""
    given, n, k = block.tensor, shard.out_features, shard.in_features
    # With the zero columns, a shard begins at the beginning of a group, that is, at an element.
    row, column = shard.rows.start - shard.above, shard.columns.start - shard.head
    shape, place = list(given.shape), [slice(None)] * given.ndim
    for dim, (unit, begin, size) in enumerate(((block.rows, row, n), (block.columns, column, k))):
        if unit and dim < given.ndim:
            shape[dim] = -(-size // unit)
            place[dim] = slice(begin // unit, begin // unit + given.shape[dim])
    if name not in whole:
        whole[name] = given.new_zeros(shape)
    whole[name][tuple(place)] = given


def _put_back(whole: dict[str, Tensor], name: str, given: Tensor, shard: Shard, group_size: int) -> None:
    assert shard.order is not None
    slots = _Slots.of(shard.order.to(given.device), shard.columns, group_size)
    if name == "q":
        whole.setdefault(name, given.new_zeros((given.shape[0], shard.in_features)))[:, slots.kept] = given[
            :, slots.places
        ]
        return
    groups = 1 if group_size == -1 else -(-shard.in_features // group_size)
    whole.setdefault(name, given.new_zeros((given.shape[0], groups)))[:, slots.groups] = given
