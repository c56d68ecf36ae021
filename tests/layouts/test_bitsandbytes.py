"""The 4-bit and int8 layouts of bitsandbytes against its own functions, and the layer that runs NF4 and FP4."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epiloq.formats.layouts import bitsandbytes as layout
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import TableLinear

SHAPES = [(64, 128), (33, 40), (5, 48), (3, 7), (1, 1), (70, 4097)]


def packed(shape: tuple[int, int], kind: str, *, nested: bool, size: int = 64) -> dict[str, Tensor]:
    """Random tensors of a layer, as a file has them."""
    count = math.prod(shape)
    blocks = -(-count // size)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "float32", "shape": list(shape)}
    tensors = {
        "weight": torch.randint(0, 256, (-(-count // 2), 1), dtype=torch.uint8),
        "weight.quant_map": torch.tensor(layout.TABLES[kind]),
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03125}
        tensors["weight.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        tensors["weight.nested_absmax"] = torch.rand(-(-blocks // 256)) * 0.01
        tensors["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
    else:
        tensors["weight.absmax"] = torch.rand(blocks)
    text = json.dumps(state).encode()
    return tensors | {layout.STATES[kind]: torch.tensor(list(text), dtype=torch.uint8)}


def meaning(tensors: dict[str, Tensor], shape: tuple[int, int], kind: str, size: int = 64) -> Tensor:
    """The weight element by element, in float32 as numbers of Python."""
    codes, scale = tensors["weight"].flatten().tolist(), tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        own = tensors["weight.nested_quant_map"][scale.long()]
        scale = own * tensors["weight.nested_absmax"].repeat_interleave(256)[: len(scale)] + 0.03125
    table = torch.tensor(layout.TABLES[kind])
    places = [codes[i // 2] >> 4 if i % 2 == 0 else codes[i // 2] & 15 for i in range(math.prod(shape))]
    values = table[places] * scale[torch.arange(len(places)) // size]
    return values.view(shape)


def layer_of(tensors: dict[str, Tensor], shape: tuple[int, int], bias: Tensor | None = None) -> TableLinear:
    state, size = layout.table_state(tensors, shape)
    layer = TableLinear(shape[1], shape[0], bias is not None, block_size=size)
    layer.load_state_dict(state | ({} if bias is None else {"bias": bias}))
    return layer


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", layout.TABLES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_match_the_tensors(seed: int, shape: tuple[int, int], kind: str, nested: bool) -> None:
    """Blocks that go on in the next row, and rows of an odd number of weights, too."""
    tensors = packed(shape, kind, nested=nested)
    expected, bias = meaning(tensors, shape, kind), torch.randn(shape[0])
    layer = layer_of(tensors, shape, bias)
    assert torch.equal(layer.dequantize(), expected)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(layer.dequantize(dtype), expected.to(dtype))
        x = torch.randn(2, 3, shape[1]).to(dtype)
        y = layer(x)
        exact = x.double() @ expected.to(dtype).double().t() + bias.double()
        assert y.dtype == dtype and y.shape == exact.shape
        bound = torch.finfo(dtype).eps * 4 * (x.double().abs() @ expected.double().abs().t() + bias.abs() + 1e-3)
        assert ((y.double() - exact).abs() <= bound + 1e-5 * exact.abs()).all()


def test_many_rows_are_dequantised_some_at_a_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    table_mm = sys.modules["epiloq.ops.table_mm"]  # whose name in the package is the function's

    shape = (37, 51)
    layer = layer_of(packed(shape, "nf4", nested=False), shape, torch.randn(37))
    x = torch.randn(4, 51)
    whole = layer(x)
    monkeypatch.setattr(table_mm, "_AT_ONCE", 51 * 5)
    torch.testing.assert_close(layer(x), whole)
    x.requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize().sum(0).expand(4, 51))


def test_layers_are_saved_and_cast(seed: int) -> None:
    shape = (33, 40)
    layer = layer_of(packed(shape, "fp4", nested=True), shape, torch.randn(33))
    again = TableLinear(40, 33)
    again.load_state_dict(layer.state_dict())
    x = torch.randn(3, 40)
    assert torch.equal(again(x), layer(x)) and layer.weight_bytes == 660 + 4 * 16 + 4 * 21
    half = again.to(torch.bfloat16)
    assert half.weight_scale.dtype == torch.float32 and half(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"TableLinear: x: expected shape \[…, 40\], got \[3, 41\]"):
        layer(torch.randn(3, 41))
    with pytest.raises(ValueError, match="TableLinear: x: expected one of"):
        layer(torch.ones(3, 40, dtype=torch.int64))
    with pytest.raises(ValueError, match="block_size: expected at least 1, got 0"):
        TableLinear(40, 33, block_size=0)


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


STATE = layout.STATES["nf4"]


def state(**changes: Any) -> Tensor:
    found = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [8, 64], **changes}
    return torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)


def test_mismatching_values_are_named(seed: int) -> None:
    shape = (8, 64)
    good = packed(shape, "nf4", nested=False)
    nested = packed(shape, "nf4", nested=True)
    for tensors, message in (
        (without(good, STATE), "quant_state.bitsandbytes__nf4: expected a tensor, found none"),
        (good | {STATE: torch.ones(3)}, "quant_state: expected JSON in uint8, got torch.float32"),
        (good | {STATE: torch.full((9,), 91, dtype=torch.uint8)}, "quant_state: expected JSON"),
        (good | {STATE: state(quant_type="fp4")}, "quant_type: expected nf4"),
        (good | {STATE: state(blocksize=0)}, "blocksize: expected a number from 1, got 0"),
        (good | {STATE: state(blocksize=2**40)}, "blocksize: expected a number from 1"),
        (good | {STATE: state(shape=[64, 8])}, r"shape: expected tensors of a layer \[8, 64\], got those of \[64, 8\]"),
        (good | {STATE: state(shape=None)}, "shape: expected two sizes, got None"),
        (without(good, "weight"), "weight: expected 256 bytes for .*, found none"),
        (good | {"weight": good["weight"][1:]}, "weight: expected 256 bytes for .*, found 255"),
        (good | {"weight.quant_map": torch.linspace(-1, 1, 16)}, "quant_map: expected the table of nf4"),
        (without(good, "weight.absmax"), "weight.absmax: expected a tensor"),
        (good | {"weight.absmax": torch.ones(7)}, r"weight.absmax: expected torch.float32 \[8\]"),
        (without(nested, "weight.nested_quant_map"), "nested_quant_map: expected a tensor"),
        (nested | {STATE: state(nested_blocksize=256)}, "nested_offset: expected a number, got None"),
    ):
        with pytest.raises(FormatError, match=message):
            layout.table_state(tensors, shape)
    rows = {"weight": torch.ones(4, 8, dtype=torch.int8), "SCB": torch.ones(4)}
    for tensors, message in (
        (without(rows, "SCB"), "SCB: expected a tensor"),
        (rows | {"SCB": torch.ones(5)}, r"SCB: expected torch.float32 \[4\]"),
        (rows | {"weight_format": torch.tensor(2, dtype=torch.uint8)}, "weight_format: expected 0"),
        (rows | {"weight": torch.ones(4, 8)}, "weight: expected torch.int8"),
    ):
        with pytest.raises(FormatError, match=message):
            layout.int8_scale(tensors, (4, 8))


@pytest.fixture(scope="module")
def theirs() -> Any:
    pytest.importorskip("bitsandbytes")
    import bitsandbytes.functional as functional

    return functional


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", layout.TABLES)
@pytest.mark.parametrize("size", [64, 256])
def test_bitsandbytes_reads_the_same_4_bits(seed: int, theirs: Any, kind: str, nested: bool, size: int) -> None:
    w = torch.randn(48, 200)
    data, described = theirs.quantize_4bit(w, quant_type=kind, compress_statistics=nested, blocksize=size)
    tensors = {"weight": data} | {f"weight.{k}": v for k, v in described.as_dict(packed=True).items()}
    layer = layer_of(tensors, (48, 200))
    expected = theirs.dequantize_4bit(data, described)
    assert torch.equal(layer.dequantize(), expected) and (expected - w).norm() < 0.2 * w.norm()
    x = torch.randn(5, 200)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, expected))
    described.dtype = torch.bfloat16
    assert torch.equal(layer.dequantize(torch.bfloat16), theirs.dequantize_4bit(data, described))


def test_bitsandbytes_reads_the_same_int8(seed: int, theirs: Any) -> None:
    q, largest, _ = theirs.int8_vectorwise_quant(torch.randn(48, 200, dtype=torch.float16))
    found, scale = layout.int8_scale({"weight": q, "SCB": largest}, (48, 200))
    expected = theirs.int8_vectorwise_dequant(q, largest)
    assert torch.equal(found, q)
    assert ((found * scale - expected).abs() <= 2.0**-22 * expected.abs()).all()
