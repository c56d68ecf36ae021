"""GGUF blocks bit for bit against the gguf package, and SmolLM2's published file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epiloq
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import OnlineQuantLinear, WeightOnlyLinear

package = pytest.importorskip("gguf")
pytest.importorskip("numpy")
pytest.importorskip("transformers")

from epiloq.formats.layouts import gguf
from gguf_files import KINDS, blocks, meaning

WRITTEN = ("Q4_0", "Q4_1", "Q8_0")
OFFSETS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 256), (17, 768), (64, 512)])
def test_blocks_have_the_bits_of_the_package(seed: int, kind: str, n: int, k: int) -> None:
    data = blocks(n, k, kind)
    packed = gguf.to_packed(data, kind=kind, shape=(n, k))
    expected = meaning(data, kind)
    assert expected.isfinite().all() and expected.shape == (n, k)
    # Equal numbers; q = 0 times a negative scale is -0 in either.
    assert torch.equal(packed.dequantize(), expected)
    assert packed.symmetric == (kind not in OFFSETS)
    x = torch.randn(5, k)
    exact = x.double() @ expected.double().t()
    bound = 1e-5 * (x.double().abs() @ expected.double().abs().t())
    assert ((epiloq.weight_only_mm(x, packed).double() - exact).abs() <= bound).all()
    if kind in WRITTEN:
        assert gguf.kind_of(packed) == kind
        again = gguf.from_packed(packed)["weight"]
        assert again.dtype == torch.uint8 and torch.equal(again, data)
    elif kind == "Q5_0":  # The same numbers in another kind.
        assert torch.equal(meaning(gguf.from_packed(packed)["weight"], "Q8_0"), expected)
    else:
        with pytest.raises(FormatError, match="gguf: "):
            gguf.from_packed(packed)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_written_by_the_package(seed: int, kind: str) -> None:
    w = torch.randn(24, 96)
    data = torch.from_numpy(package.quants.quantize(w.numpy(), package.GGMLQuantizationType[kind]).copy())
    packed = gguf.to_packed(data, kind=kind)
    assert torch.equal(packed.dequantize(), meaning(data, kind))
    assert (packed.dequantize() - w).norm() < 0.15 * w.norm()
    if kind in WRITTEN:
        assert torch.equal(gguf.from_packed(packed)["weight"], data)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_for_integer_products(seed: int, kind: str) -> None:
    """The same integers and scales; one rounding of the offset of Q4_1 and Q4_K."""
    data = blocks(20, 512, kind, small=True)
    weight, expected = gguf.to_online(data, kind=kind), meaning(data, kind)
    assert (weight.offset is None) == (kind not in OFFSETS)
    assert weight.bits == (8 if kind in ("Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q6_K") else 4)
    if kind in ("Q4_1", "Q4_K"):
        assert ((weight.dequantize() - expected).abs() <= 2.0**-22 * (expected.abs().max() * 16)).all()
    else:
        assert torch.equal(weight.dequantize(), expected)
    layer = OnlineQuantLinear.from_prepared(weight, bias=torch.randn(20))
    x = torch.randn(3, 512)
    exact = x @ expected.t() + layer.bias
    assert (layer(x) - exact).norm() < 0.02 * exact.norm()
    group = 16 if kind in ("Q2_K", "Q3_K", "Q6_K") else 32
    restored = OnlineQuantLinear(512, 20, bits=weight.bits, group_size=group, symmetric=weight.offset is None)
    restored.load_state_dict(layer.state_dict())
    assert torch.equal(restored(x), layer(x))


def test_mismatching_values_are_named(seed: int) -> None:
    data = blocks(4, 64, "Q4_0")
    for call, message in (
        (lambda: gguf.to_packed(data, kind="Q4_5"), "kind: expected one of Q4_0, Q4_1, .*, got 'Q4_5'"),
        (lambda: gguf.to_packed(data[:, :-1], kind="Q4_0"), "weight: expected uint8 rows of Q4_0 blocks of 18 bytes"),
        (lambda: gguf.to_packed(data.int(), kind="Q4_0"), "weight: expected uint8"),
        (lambda: gguf.to_packed(data[0], kind="Q4_0"), "weight: expected 2 dimensions"),
        (lambda: gguf.to_packed(data, kind="Q4_0", shape=(4, 96)), r"weight: expected blocks of a layer \[4, 96\]"),
        (lambda: gguf.to_online(data, kind="Q4_0", shape=(8, 64)), r"weight: expected blocks of a layer \[8, 64\]"),
    ):
        with pytest.raises(FormatError, match=message):
            call()
    q, one = torch.randint(0, 16, (4, 64)), torch.ones(4, 2).half()
    for changes, message in (
        ({"zero": torch.ones(4, 2, dtype=torch.int32)}, "without integer zero points"),
        ({"group_size": 64, "scale": one[:, :1], "offset": one[:, :1]}, "whole groups of 32"),
        ({"scale": one.float(), "offset": one.float()}, "scale: expected float16"),
        ({"bits": 8, "offset": one}, "8 bits with offsets"),
        ({"perm": torch.randperm(64), "offset": one}, "in order"),
    ):
        arguments: dict[str, Any] = {"q": q, "scale": one, "bits": 4, "group_size": 32, **changes}
        with pytest.raises(FormatError, match=message):
            gguf.from_packed(epiloq.pack_weight(**arguments))
    with pytest.raises(ValueError, match=r"OnlineQuantLinear: bias: expected a floating-point tensor \[4\] on cpu"):
        OnlineQuantLinear.from_prepared(gguf.to_online(data, kind="Q4_0"), torch.zeros(5))


# "Four score and seven years ago our fathers brought forth on this continent, a new nation, .. created equal."
WELL_KNOWN = """19622 6581 284 4962 929 3156 653 16576 3621 7146 335 451 10904 28 253 725 3442 28 19250 281 20577 28 284
5636 288 260 20723 338 511 1800 359 2312 4037 30"""


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_as_it_is_published(seed: int) -> None:
    """Q4_1 layers, a Q8_0 embedding that is the head too: it knows the sentence, so rows are where they belong."""
    pytest.importorskip("transformers")
    from epiloq.demo import DemoError
    from epiloq.demo.teacher import find_gguf
    from epiloq.formats.io import gguf_model

    try:
        path = find_gguf()
    except DemoError as error:
        pytest.skip(str(error))
    model: Any = gguf_model.load(path)
    kinds = [
        (m.bits, m.group_size, m.weight_offset is not None) for m in model.modules() if type(m) is WeightOnlyLinear
    ]
    assert kinds.count((4, 32, True)) == 210 and kinds.count((8, 32, False)) == 1 == len(kinds) - 210
    tokens = torch.tensor([[int(token) for token in WELL_KNOWN.split()]])
    # The float model, dequantised by transformers, has 2.97498.
    assert float(model(tokens, labels=tokens).loss) == pytest.approx(2.97498, abs=1e-3)
