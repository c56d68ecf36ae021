"""Decomposition of a quantised linear layer into matrices that can be split: integers, scales and zero points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epiloq.formats.epiloq_modules import KINDS, Options
from epiloq.nn import (
    Fp4Linear,
    Fp8BlockLinear,
    Fp8Linear,
    Fp8WeightOnlyLinear,
    Int8Linear,
    OnlineQuantLinear,
    TableLinear,
    W4A8Fp4Linear,
    W4A8Linear,
    WeightOnlyLinear,
)
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.nn.base.scaled_input import SCALE
from epiloq.weights.block_quant_weight import prepare
from epiloq.weights.fp4 import FORMATS as FP4_FORMATS
from epiloq.weights.fp4 import packed as packed_codes
from epiloq.weights.packed_weight import pack_weight


class BlockedTensor(NamedTuple):
    """A tensor of a layer, ``[rows, columns]`` or ``[rows]``, and the numbers of rows and columns of the weight that
    share an element of it. 0 means all: such a tensor is the same in every shard."""

    tensor: Tensor
    rows: int
    columns: int


@dataclass(frozen=True)
class Cut:
    """Functions that take apart and create layers of a class, for splitting and merging them.

    take
        Returns a layer's tensors by name, with the integers as "q".
    make
        Creates a layer ``[n, k]`` from tensors with these names and the options of another layer.
    tail
        Whether columns must also end at the end of a scale group.
    """

    take: Callable[[Any], dict[str, BlockedTensor]]
    make: Callable[[Any, Mapping[str, Tensor], int, int, Options], Any]
    tail: bool = False


def _prepared(**units: Callable[[Any], tuple[int, int]]) -> Cut:
    """`Cut` for layers that store their tensors unpacked; `units` are those of the scales."""

    def take(layer: Any) -> dict[str, BlockedTensor]:
        blocked = {"q": BlockedTensor(layer._stored("weight_q"), 1, 1)}
        for name, unit in units.items():
            if (tensor := layer._stored(name)) is not None:
                blocked[name] = BlockedTensor(tensor, *unit(layer))
        return blocked

    def make(layer: Any, tensors: Mapping[str, Tensor], n: int, k: int, options: Options) -> Any:
        q = tensors["q"]
        made = type(layer)(k, n, False, **options, device="meta", dtype=layer.dtype)
        made._store("weight_q", q.contiguous())
        for name in units.keys() & tensors.keys():
            made._store(name, tensors[name].contiguous())
        return made

    return Cut(take, make)


def _all(layer: Any) -> tuple[int, int]:
    return 0, 0


def _packed_take(layer: Any) -> dict[str, BlockedTensor]:
    q, scale, zero = layer.packed.unpack()
    length = max(layer.group_size, 0)
    blocked = {"q": BlockedTensor(q, 1, 1), "scale": BlockedTensor(scale, 1, length)}
    blocked |= {} if zero is None else {layer.zeros: BlockedTensor(zero, 1, length)}
    return blocked | _scaled_take(layer)


def _scaled_take(layer: Any) -> dict[str, BlockedTensor]:
    """The vector that scales inputs; it has one element per column of the weight."""
    scale = layer._stored(SCALE)
    return {} if scale is None else {SCALE: BlockedTensor(scale.detach()[None], 0, 1)}


def _scaled_make(made: Any, tensors: Mapping[str, Tensor]) -> Any:
    if SCALE in tensors:
        made._store(SCALE, tensors[SCALE].flatten())
    return made


def _packed_make(layer: Any, tensors: Mapping[str, Tensor], n: int, k: int, options: Options) -> Any:
    bits = options.get("bits", 4)
    rest = {name: tensor for name, tensor in tensors.items() if name in ("zero", "offset", "perm")}
    packed = pack_weight(tensors["q"], tensors["scale"], **rest, bits=bits, group_size=options["group_size"])
    more = {"activation": options["activation"]} if "activation" in options else {}
    made = type(layer).from_packed(packed, **more)
    made._dtype = layer.dtype
    return _scaled_make(made, tensors)


def _online_take(layer: Any) -> dict[str, BlockedTensor]:
    q, scale, offset = layer.prepared.unpack()
    blocked = {"q": BlockedTensor(q, 1, 1), "scale": BlockedTensor(scale, 1, layer.group_size)}
    return blocked if offset is None else blocked | {"offset": BlockedTensor(offset, 1, layer.group_size)}


def _online_make(layer: Any, tensors: Mapping[str, Tensor], n: int, k: int, options: Options) -> Any:
    weight = prepare(tensors["q"], tensors["scale"], tensors.get("offset"), options["group_size"], options["bits"])
    made = OnlineQuantLinear.from_prepared(weight)
    made._dtype = layer.dtype
    return made


def _table_take(layer: Any) -> dict[str, BlockedTensor]:
    n, k, block = layer.out_features, layer.in_features, layer.block_size
    packed = layer._stored("weight_q")
    codes = torch.stack((packed >> 4, packed & 15), 1).flatten()[: n * k].view(n, k)
    # Blocks continue across rows. Units of gcd(block, k) columns lie in one row and in one block.
    unit = math.gcd(block, k)
    scale = layer._stored("weight_scale").repeat_interleave(block // unit)[: n * k // unit].view(n, k // unit)
    table = BlockedTensor(layer._stored("weight_table"), 0, 0)
    return {"q": BlockedTensor(codes, 1, 1), "weight_scale": BlockedTensor(scale, 1, unit), "weight_table": table}


def _table_make(layer: Any, tensors: Mapping[str, Tensor], n: int, k: int, options: Options) -> Any:
    block, scale = options["block_size"], tensors["weight_scale"]
    unit = k // scale.shape[1]
    # A shard whose rows do not begin at blocks has smaller blocks.
    length = block if k % unit == 0 and (n, k) == (layer.out_features, layer.in_features) else unit
    codes = nn.functional.pad(tensors["q"].flatten(), (0, n * k % 2)).view(-1, 2)
    made = TableLinear(k, n, False, block_size=length, device="meta", dtype=layer.dtype)
    made._store("weight_q", (codes[:, 0] << 4) | codes[:, 1])
    made._store("weight_table", tensors["weight_table"])
    made._store("weight_scale", scale.flatten()[:: length // unit].contiguous())
    return made


_FP4_SCALARS = ("weight_global_scale", "input_scale")


def _fp4_take(layer: Any) -> dict[str, BlockedTensor]:
    state, unit = layer.file_state(), FP4_FORMATS[layer.format].block_size
    packed, scale = state["weight"], state["weight_scale"].view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), 2).flatten(1)[:, : layer.in_features]
    blocked = {"q": BlockedTensor(codes, 1, 1), "weight_scale": BlockedTensor(scale, 1, unit)}
    blocked |= _scaled_take(layer)
    return blocked | {name: BlockedTensor(state[name], 0, 0) for name in _FP4_SCALARS if name in state}


def _fp4_make(layer: Any, tensors: Mapping[str, Tensor], n: int, k: int, options: Options) -> Any:
    codes = packed_codes(nn.functional.pad(tensors["q"], (0, k % 2)))
    made = type(layer)(k, n, False, **options, device=codes.device, dtype=layer.dtype)
    scale = tensors["weight_scale"].contiguous().view(FP4_FORMATS[layer.format].scale_dtype)
    whole = {name: tensors[name] for name in _FP4_SCALARS if name in tensors}
    whole |= {SCALE: tensors[SCALE].flatten()} if SCALE in tensors else {}
    made.load_state_dict({"weight": codes, "weight_scale": scale, **whole})
    return made


def _fp8_only(layer: Any) -> tuple[int, int]:
    rows, columns = layer.block
    return max(rows, 0), max(columns, 0)


CUTS: Mapping[type[nn.Module], Cut] = {
    Int8Linear: _prepared(weight_scale=lambda layer: (1, 0), input_scale=_all, input_zero_point=_all),
    Fp8Linear: _prepared(
        weight_scale=lambda layer: (1 if layer.weight_scales == "channel" else 0, 0), input_scale=_all
    ),
    Fp8BlockLinear: _prepared(weight_scale_inv=lambda layer: (layer.rows, FP8_BLOCK)),
    Fp8WeightOnlyLinear: _prepared(weight_scale=_fp8_only),
    WeightOnlyLinear: Cut(_packed_take, _packed_make),
    W4A8Linear: Cut(_packed_take, _packed_make),
    OnlineQuantLinear: Cut(_online_take, _online_make),
    Fp4Linear: Cut(_fp4_take, _fp4_make, tail=True),
    W4A8Fp4Linear: Cut(_fp4_take, _fp4_make, tail=True),
    TableLinear: Cut(_table_take, _table_make, tail=True),
}


def cut_of(layer: nn.Module) -> Cut:
    """The `Cut` for a layer. Raises ValueError unless it is one of epiloq's quantised linear layers."""
    if type(layer) not in CUTS:
        known = ", ".join(kind.__name__ for kind in CUTS)
        raise ValueError(f"epiloq.parallel: layer: expected one of {known}, got {type(layer).__name__}")
    return CUTS[type(layer)]


def options_of(layer: nn.Module) -> Options:
    """The arguments of a layer's constructor other than its sizes."""
    return KINDS[type(layer).__name__].options_of(layer)
