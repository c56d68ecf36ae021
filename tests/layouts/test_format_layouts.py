"""Layouts against each format's own unpacker, or one written out from its definition element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epiloq.formats.configs import awq as awq_config
from epiloq.formats.configs import compressed_tensors as ct_config
from epiloq.formats.configs import gptq as gptq_config
from epiloq.formats.description import of_grid
from epiloq.formats.layouts import awq, compressed_tensors, gptq
from epiloq.formats.layouts.base import FormatError, Quantization
from epiloq.formats.layouts.compressed_tensors import INTEGER, PACKED
from epiloq.formats.layouts.words import pack, unpack
from epiloq.quantize import Grid, QuantizedWeight, rtn
from epiloq.quantize import gptq as run_gptq
from layout_definitions import stream


def weight(rows: int, columns: int, grid: Grid) -> QuantizedWeight:
    """Rounded random weights, with every zero point (0 and the last too) among many groups."""
    return rtn(torch.randn(rows, columns) + torch.randn(rows, 1), replace(grid, scale_dtype=torch.float16))


def same(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    both = ((a.q, b.q), (a.scale, b.scale), (a.zero, b.zero), (a.perm, b.perm))
    return all(x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in both)


def field(words: Tensor, index: tuple[int, ...], position: int, bits: int) -> int:
    return (int(words[index]) >> position * bits) & (2**bits - 1)


@pytest.mark.parametrize("bits", range(2, 9))
def test_words(seed: int, bits: int) -> None:
    for length in (1, 7, 11, 32, 33, 64):
        values = torch.randint(0, 2**bits, (3, length), dtype=torch.uint8)
        words = pack(values, bits)
        assert words.shape == (3, -(-length * bits // 32))
        for row in range(3):
            assert stream(words[row], bits)[:length] == values[row].tolist()
        assert torch.equal(unpack(words, bits, length), values)
    with pytest.raises(ValueError, match="bits: expected 2 to 8"):
        pack(values, 9)
    if bits < 8:
        with pytest.raises(ValueError, match="below"):
            pack(torch.tensor([0, 2**bits]), bits)
    with pytest.raises(ValueError, match="int32"):
        unpack(words, bits, 999)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, -1), (8, -1), (2, 16)])
@pytest.mark.parametrize("version", gptq.VERSIONS)
def test_gptq(seed: int, bits: int, group: int, symmetric: bool, version: str) -> None:
    value = weight(32, 96, Grid(bits, group, symmetric))
    if version == "gptq" and not symmetric:
        assert value.zero is not None
        value = replace(value, zero=value.zero.clamp(min=1))
    tensors = gptq.to_tensors(value, version)
    found = torch.empty(32, 96)
    for n in range(32):
        for k in range(96):
            g = int(tensors["g_idx"][k])
            count = 32 // bits
            zero = field(tensors["qzeros"], (g, n // count), n % count, bits) + (version == "gptq")
            q = field(tensors["qweight"], (k // count, n), k % count, bits)
            found[n, k] = (q - zero) * tensors["scales"][g, n].float()
    assert torch.equal(found, value.dequantize())
    assert same(gptq.from_tensors(tensors, value.grid, version, (32, 96)), value)


def test_version_one_has_sixteen(seed: int) -> None:
    """A stored 15 means a zero point of 16, which the other formats have no field for."""
    value = weight(8, 32, Grid(4, 32))
    assert value.zero is not None
    sixteen = replace(value, zero=torch.full_like(value.zero, 16))
    tensors = gptq.to_tensors(sixteen, "gptq")
    assert (tensors["qzeros"] == -1).all()
    assert same(gptq.from_tensors(tensors, value.grid, "gptq", (8, 32)), sixteen)
    for refused in (lambda: gptq.to_tensors(sixteen, "gptq_v2"), lambda: awq.to_tensors(sixteen)):
        with pytest.raises(ValueError, match=r"below 16|zero point of 16"):
            refused()


def test_gptq_in_activation_order(seed: int) -> None:
    x = torch.randn(200, 64) * torch.rand(64)
    grid = Grid(4, 16, False, torch.float16)
    value = run_gptq(torch.randn(8, 64), x.t() @ x, grid, static_groups=False)
    assert value.perm is not None
    tensors = gptq.to_tensors(value, "gptq_v2")
    again = gptq.from_tensors(tensors, grid, "gptq_v2", (8, 64))
    assert torch.equal(again.dequantize(), value.dequantize())
    columns = [(unpack(tensors["qweight"].t(), 4, 64)[:, k].float()) for k in range(64)]
    zeros = unpack(tensors["qzeros"], 4, 8).float()
    for k in range(64):
        g = int(tensors["g_idx"][k])
        assert torch.equal((columns[k] - zeros[g]) * tensors["scales"][g].float(), value.dequantize()[:, k])
    with pytest.raises(FormatError, match="g_idx"):
        gptq.from_tensors({**tensors, "g_idx": torch.zeros(64, dtype=torch.int32)}, grid, "gptq_v2", (8, 64))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 96, -1])
def test_awq(seed: int, group: int, symmetric: bool) -> None:
    value = weight(16, 96, Grid(4, group, symmetric))
    tensors = awq.to_tensors(value)
    length = 96 if group == -1 else group
    found = torch.empty(16, 96)
    for n in range(16):
        nibble = [0, 2, 4, 6, 1, 3, 5, 7].index(n % 8)
        for k in range(96):
            q = field(tensors["qweight"], (k, n // 8), nibble, 4)
            zero = field(tensors["qzeros"], (k // length, n // 8), nibble, 4)
            found[n, k] = (q - zero) * tensors["scales"][k // length, n].float()
    assert torch.equal(found, value.dequantize())
    again = awq.from_tensors(tensors, value.grid.group_size, "gemm", (16, 96))
    # Zero points are always there.
    assert torch.equal(again.dequantize(), found) and (symmetric or same(again, value))


CASES = [
    ("pack-quantized", Grid(4, 32, symmetric=True), None),
    ("pack-quantized", Grid(4, 32, symmetric=False), None),
    ("pack-quantized", Grid(8, -1, symmetric=True), None),
    ("pack-quantized", Grid(8, -1, symmetric=False), None),
    ("int-quantized", Grid(8, -1, symmetric=True), "int8"),
    ("int-quantized", Grid(8, -1, symmetric=True), "int8-azp"),
]


@pytest.mark.parametrize(("layout", "grid", "activations"), CASES, ids=str)
@pytest.mark.parametrize("rows", [40, 41])
def test_compressed_tensors(seed: int, layout: str, grid: Grid, activations: Any, rows: int) -> None:
    """Its own schema and its own decompressor."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    schemas = pytest.importorskip("compressed_tensors.quantization")
    value, described = weight(rows, 96, grid), of_grid(Quantization(grid, activations), layout)
    tensors = compressed_tensors.to_tensors(value, described, torch.float32)
    config = ct_config.config({"layer": described}, ["lm_head"])
    scheme = schemas.QuantizationConfig.model_validate(config).config_groups["group_0"]
    theirs = compressors.BaseCompressor.get_value_from_registry(layout).decompress(tensors, scheme)
    assert torch.equal(theirs["weight"], value.dequantize())
    assert same(compressed_tensors.from_tensors(tensors, described, (rows, 96)), value)
    rules = ct_config.parse(config)
    assert rules(["layer"], nn.Linear) == described and rules(["lm_head"], nn.Linear) is None


@pytest.mark.parametrize(("layout", "grid", "activations"), CASES[:5], ids=str)
def test_compressed_tensors_packs_the_same_words(seed: int, layout: str, grid: Grid, activations: Any) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    schemas = pytest.importorskip("compressed_tensors.quantization")
    value, described = weight(24, 64, grid), of_grid(Quantization(grid, activations), layout)
    ours = compressed_tensors.to_tensors(value, described, torch.float32)
    scheme = schemas.QuantizationConfig.model_validate(ct_config.config({"layer": described}, [])).config_groups
    state = {"weight": value.dequantize(), "weight_scale": value.scale}
    if value.zero is not None:
        state["weight_zero_point"] = (value.zero - (1 << (grid.bits - 1))).to(torch.int8)
    theirs = compressors.BaseCompressor.get_value_from_registry(layout).compress(state, scheme["group_0"])
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_configurations_are_read_back() -> None:
    for version in gptq.VERSIONS:
        described = of_grid(Quantization(Grid(4, 64, symmetric=version == "gptq")), version)
        rules = gptq_config.parse(gptq_config.config({"layer": described}, ["lm_head"]))
        assert rules(["layer"], nn.Linear) == described
    described = of_grid(Quantization(Grid(4, 128)), "gemm")
    rules = awq_config.parse(awq_config.config({"layer": described}, ["lm_head"]))
    assert rules(["layer"], nn.Linear) == described and rules(["lm_head"], nn.Linear) is None


def test_formats_refuse_unsupported_weights(seed: int) -> None:
    ragged = weight(8, 72, Grid(4, 32))
    for refused in (
        lambda: compressed_tensors.to_tensors(ragged, of_grid(Quantization(ragged.grid), PACKED), torch.float32),
        lambda: awq.to_tensors(ragged),
        lambda: awq.to_tensors(weight(9, 64, Grid(4, 32))),
        lambda: gptq.to_tensors(weight(8, 63, Grid(4, -1)), "gptq_v2"),
        lambda: gptq.to_tensors(weight(9, 64, Grid(4, -1)), "gptq_v2"),
    ):
        with pytest.raises(FormatError, match="multiple"):
            refused()
    assert same(gptq.from_tensors(gptq.to_tensors(ragged, "gptq_v2"), ragged.grid, "gptq_v2", (8, 72)), ragged)
    positive = rtn(torch.rand(8, 64), Grid(4, 32))
    with pytest.raises(FormatError, match="gptq_v2"):
        gptq.to_tensors(positive, "gptq")
    with pytest.raises(FormatError, match="4 bits"):
        awq.to_tensors(weight(8, 64, Grid(8, 32)))
    with pytest.raises(FormatError, match="symmetric"):
        compressed_tensors.to_tensors(
            weight(8, 64, Grid(8)), of_grid(Quantization(Grid(8), "int8"), INTEGER), torch.float32
        )


def test_tensors_that_disagree_are_refused(seed: int) -> None:
    value = weight(16, 64, Grid(4, 32))
    readers = {
        "awq": (awq.to_tensors(value), lambda t: awq.from_tensors(t, value.grid.group_size, "gemm", (16, 64))),
        "awq gemv": (
            awq.to_tensors(value, "gemv"),
            lambda t: awq.from_tensors(t, value.grid.group_size, "gemv", (16, 64)),
        ),
        "gptq": (
            gptq.to_tensors(value, "gptq_v2"),
            lambda t: gptq.from_tensors(t, value.grid, "gptq_v2", (16, 64)),
        ),
        "compressed-tensors": (
            compressed_tensors.to_tensors(value, of_grid(Quantization(value.grid), PACKED), torch.float32),
            lambda t: compressed_tensors.from_tensors(t, of_grid(Quantization(value.grid), PACKED), (16, 64)),
        ),
    }
    for tensors, read in readers.values():
        for name, tensor in tensors.items():
            for wrong in (None, tensor[:-1], tensor.double().to(torch.complex64)):
                if name == "g_idx" and wrong is None:
                    continue  # Groups are in order then.
                changed = {k: v for k, v in tensors.items() if k != name} | ({} if wrong is None else {name: wrong})
                with pytest.raises(FormatError, match=name):
                    read(changed)


@pytest.mark.parametrize(
    ("parse", "config"),
    [
        (gptq_config.parse, {"bits": 4}),
        (gptq_config.parse, {"bits": 4, "group_size": 32, "checkpoint_format": "marlin"}),
        (awq_config.parse, {"bits": 8, "group_size": 32}),
        (awq_config.parse, {"bits": 4, "group_size": 32, "version": "marlin"}),
        (ct_config.parse, {}),
        (ct_config.parse, {"quant_method": "compressed-tensors", "config_groups": {}}),
    ],
)
def test_unknown_configurations_are_refused(parse: Any, config: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        parse(config)
