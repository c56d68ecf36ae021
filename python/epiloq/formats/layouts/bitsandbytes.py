"""The layouts of bitsandbytes: LLM.int8's rows of int8 with a scale each, and the 4-bit types NF4 and FP4.

Defined by bitsandbytes 0.50: ``functional.py`` (``QuantState``, ``dequantize_4bit``, ``dequantize_blockwise``) and
``backends/default/ops.py`` (``int8_vectorwise_dequant``, ``_dequantize_4bit_compute``).

int8
    ``weight`` int8 ``[N, K]``, ``SCB`` float32 ``[N]``, the largest magnitude of a row: ``W = weight * SCB / 127``.
4 bits
    ``weight`` any type ``[bytes / size of the type, 1]``, weight 2i in the high half of byte i, in row-major order;
    ``weight.quant_map`` float32 ``[16]``; ``weight.absmax`` float32, one per block of the flattened weight, or uint8
    indices into ``weight.nested_quant_map`` float32 ``[256]``, in blocks with a factor per block in
    ``weight.nested_absmax``; ``weight.quant_state.bitsandbytes__nf4``: sizes as JSON in uint8, including the offset
    added to nested scales.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epiloq.formats.layouts.base import FormatError, check_shape, require
from epiloq.formats.weights import ModuleWeight
from epiloq.nn.table_linear import ENTRIES, TableLinear
from epiloq.weights.grid import Grid, QuantizedWeight

_POSITIVE = (0.0, 0.0052083335, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25)
TABLES = {
    "nf4": (
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ),
    "fp4": (*_POSITIVE, *(-value for value in _POSITIVE)),
}
"""The values that bitsandbytes uses, regardless of the table in a file."""
STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in TABLES}
INT8_PARTS = frozenset({"weight", "SCB", "weight_format"})
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
PARTS = frozenset({"weight", "weight.quant_map", "weight.absmax", *NESTED, *STATES.values()})
_LONGEST_STATE = 1 << 16
_PLACES = 256
# bitsandbytes multiplies by the reciprocal rather than dividing by 127.
_PER_127 = 7.874015718698502e-3


def int8_weight(tensors: Mapping[str, Tensor], described: object, shape: tuple[int, int]) -> QuantizedWeight:
    """The weight that LLM.int8's tensors represent. Raises FormatError as `int8_scale` does."""
    q, scale = int8_scale(tensors, shape)
    return QuantizedWeight(q, scale, None, Grid(8, -1, symmetric=True))


def check_int8(tensors: Mapping[str, Tensor], described: object, shape: tuple[int, int]) -> None:
    """Raise FormatError for tensors of other types or shapes than a layer's; their values are not looked at."""
    require(tensors, {"weight": (torch.int8, shape), "SCB": (torch.float32, shape[:1])})


def table_weight(tensors: Mapping[str, Tensor], described: object, shape: tuple[int, int]) -> ModuleWeight:
    """The weight that 4-bit tensors represent. Raises FormatError as `table_state` does."""
    state, size = table_state(tensors, shape)

    def values() -> Tensor:
        layer = TableLinear(shape[1], shape[0], bias=False, block_size=size)
        layer.load_state_dict(state)
        return layer.dequantized_weight()

    return ModuleWeight("TableLinear", {"block_size": size}, state, values)


def check_table(tensors: Mapping[str, Tensor], described: object, shape: tuple[int, int]) -> None:
    """Raise FormatError for tensors of other types or shapes than a layer's; their values are not looked at."""
    require(tensors, {"weight.quant_map": (torch.float32, (ENTRIES,))})
    wanted = -(-math.prod(shape) // 2)
    if "weight" not in tensors or tensors["weight"].nbytes != wanted:
        found = f"{tensors['weight'].nbytes} bytes" if "weight" in tensors else "none"
        raise FormatError(f"weight: expected {wanted} bytes for {list(shape)}, found {found}")


def block_size(tensors: Mapping[str, Tensor]) -> int:
    """Number of weights per scale, from one of the tensors in `STATES`. Raises FormatError if missing or invalid."""
    kind = _kind(tensors)
    return _size(_state(tensors[STATES[kind]], kind), "blocksize")


def int8_scale(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """q int8 ``[N, K]`` and scale float32 ``[N, 1]`` of LLM.int8's tensors, ``W = q * scale``.

    bitsandbytes multiplies by SCB first and then by 1 / 127, so its float32 values may differ by up to two units in the
    last place. Raises FormatError for tensors of another layer than ``[N, K]``, or not in row-major order.
    """
    require(tensors, {"weight": (torch.int8, shape), "SCB": (torch.float32, shape[:1])})
    order = tensors.get("weight_format")
    if order is not None and (order.numel() != 1 or int(order) != 0):
        raise FormatError(f"weight_format: expected 0, rows one after another, got {order.flatten()[:4].tolist()}")
    return tensors["weight"], (tensors["SCB"] * _PER_127)[:, None]


def table_state(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[dict[str, Tensor], int]:
    """The state dict of a biasless ``nn.TableLinear``, and its block size, from 4-bit tensors of a layer ``[N, K]``.

    Nested scales are dequantised as bitsandbytes does. Raises FormatError for tensors that disagree.
    """
    kind = _kind(tensors)
    state = _state(tensors[STATES[kind]], kind)
    size, count = _size(state, "blocksize"), math.prod(shape)
    check_shape("bitsandbytes", _shape(state), shape)
    blocks = -(-count // size)
    require(tensors, {"weight.quant_map": (torch.float32, (ENTRIES,))})
    table = tensors["weight.quant_map"]
    if not torch.allclose(table.cpu(), torch.tensor(TABLES[kind]), rtol=0, atol=1e-6):
        raise FormatError(f"weight.quant_map: expected the table of {kind}, got {table.tolist()}")
    codes = tensors["weight"].contiguous().flatten().view(torch.uint8) if "weight" in tensors else None
    if codes is None or codes.numel() != -(-count // 2):
        found = "none" if codes is None else f"{codes.numel()} bytes"
        raise FormatError(f"weight: expected {-(-count // 2)} bytes for {list(shape)}, found {found}")
    if any(name in tensors for name in NESTED):
        scale = _nested(tensors, state, blocks)
    else:
        require(tensors, {"weight.absmax": (torch.float32, (blocks,))})
        scale = tensors["weight.absmax"]
    return {"weight": codes, "weight_table": table, "weight_scale": scale}, size


def _kind(tensors: Mapping[str, Tensor]) -> str:
    found = [kind for kind in TABLES if STATES[kind] in tensors]
    if len(found) != 1:
        raise FormatError(f"{STATES['nf4']}: expected a tensor, found {' and '.join(found) or 'none'}")
    return found[0]


def _nested(tensors: Mapping[str, Tensor], state: Mapping[str, Any], blocks: int) -> Tensor:
    size, offset = _size(state, "nested_blocksize"), state.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, (int, float)) or not math.isfinite(offset):
        raise FormatError(f"quant_state: nested_offset: expected a number, got {offset!r}")
    require(
        tensors,
        {
            "weight.absmax": (torch.uint8, (blocks,)),
            "weight.nested_quant_map": (torch.float32, (_PLACES,)),
            "weight.nested_absmax": (torch.float32, (-(-blocks // size),)),
        },
    )
    factors = tensors["weight.nested_absmax"].repeat_interleave(size)[:blocks]
    return tensors["weight.nested_quant_map"][tensors["weight.absmax"].long()] * factors + torch.tensor(float(offset))


def _state(packed: Tensor, kind: str) -> dict[str, Any]:
    if packed.dtype != torch.uint8 or packed.numel() > _LONGEST_STATE:
        raise FormatError(f"quant_state: expected JSON in uint8, got {packed.dtype} {list(packed.shape)}")
    try:
        found = json.loads(bytes(packed.flatten().tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"quant_state: expected JSON in uint8: {error}") from None
    if not isinstance(found, dict) or found.get("quant_type") != kind:
        raise FormatError(f"quant_state: quant_type: expected {kind}, got {found!r:.100}")
    return found


def _size(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise FormatError(f"quant_state: {key}: expected a number from 1, got {value!r}")
    return value


def _shape(state: Mapping[str, Any]) -> tuple[int, int]:
    value = state.get("shape")
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int for size in value):
        raise FormatError(f"quant_state: shape: expected two sizes, got {value!r}")
    return value[0], value[1]
