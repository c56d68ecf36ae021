"""PackedWeight: what goes in comes out, on every path that a weight takes through its life."""

from __future__ import annotations

import copy
import io
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import epiloq
from epiloq import PackedWeight
from weight_reference import KINDS, Weight, make_weight

BITS = (2, 3, 4, 8)


def assert_unpacks(w: Weight, packed: PackedWeight) -> None:
    q, scale, zero_or_offset = packed.unpack()
    assert q.dtype == (torch.int8 if packed.symmetric else torch.uint8)
    assert torch.equal(q.cpu(), w.q.cpu()) and torch.equal(scale.cpu(), w.scale.cpu())
    assert scale.dtype == w.scale.dtype
    given = w.zero if w.offset is None else w.offset
    assert (zero_or_offset is None) == (given is None)
    if given is not None and zero_or_offset is not None:
        assert torch.equal(zero_or_offset.cpu(), given.cpu())


@settings(max_examples=150)
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    bits=st.sampled_from(BITS),
    group_size=st.one_of(st.just(-1), st.sampled_from([32, 64, 128]), st.integers(1, 400)),
    kind=st.sampled_from(KINDS),
    scale_dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    act_order=st.booleans(),
    draw=st.integers(0, 2**32 - 1),
)
def test_any_weight_unpacks_and_dequantises(
    n: int, k: int, bits: int, group_size: int, kind: str, scale_dtype: torch.dtype, act_order: bool, draw: int
) -> None:
    torch.manual_seed(draw)
    w = make_weight(n, k, bits, group_size, kind, scale_dtype=scale_dtype, act_order=act_order)
    w.packed.check()
    assert_unpacks(w, w.packed)
    restored = w.packed.dequantize()
    assert restored.dtype == torch.float32 and restored.shape == w.packed.shape == (n, k)
    assert ((restored.double() - w.dense).abs() <= 2.0**-23 * w.size).all()
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(w.packed.dequantize(dtype), restored.to(dtype))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_devices_agree(seed: int, device: str, bits: int, kind: str, scale_dtype: torch.dtype) -> None:
    """Packed here or there, bytes are the same; and so are the bits of what comes back."""
    for n, k, group_size in ((100, 576, 64), (17, 4095, 128), (33, 1000, 96), (16, 128, -1), (1, 1, 32)):
        w = make_weight(n, k, bits, group_size, kind, scale_dtype=scale_dtype, act_order=n == 17)
        parts = [None if t is None else t.to(device) for t in (w.q, w.scale, w.zero, w.offset)]
        perm = None if w.perm is None else w.perm.to(device)
        there = epiloq.pack_weight(*parts, bits=bits, group_size=group_size, perm=perm)
        for name, tensor in w.packed.state_dict().items():
            assert torch.equal(tensor, there.state_dict()[name].cpu()), name
        assert_unpacks(w, there)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert torch.equal(there.dequantize(dtype).cpu(), w.packed.dequantize(dtype))


@pytest.mark.parametrize("bits", BITS)
def test_every_value_in_every_position(bits: int) -> None:
    """A panel of one group: each integer of the grid, at every position."""
    values = 1 << bits
    for shift in range(values if bits < 8 else 16):
        q = (torch.arange(16 * 128).view(16, 128) * 7 + shift) % values
        packed = epiloq.pack_weight(
            q, torch.ones(16, 1), torch.zeros(16, 1, dtype=torch.int32), bits=bits, group_size=-1
        )
        assert torch.equal(packed.dequantize(), q.float())
        assert torch.equal(packed.unpack()[0], q)


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (0, 0)])
@pytest.mark.parametrize("bits", BITS)
def test_empty_weights(shape: tuple[int, int], bits: int) -> None:
    groups = -(-shape[1] // 32)
    w = epiloq.pack_weight(torch.zeros(shape, dtype=torch.int8), torch.ones(shape[0], groups), bits=bits, group_size=32)
    assert w.unpack()[0].shape == w.dequantize().shape == shape
    assert w.unpack()[1].shape == (shape[0], groups)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w)), lambda w: w.to("cpu")])
def test_copies(seed: int, kind: str, duplicate: Any) -> None:
    w = make_weight(20, 100, kind=kind, act_order=True)
    other = duplicate(w.packed)
    assert type(other) is PackedWeight and repr(other) == repr(w.packed)
    assert_unpacks(w, other)
    assert torch.equal(other.dequantize(), w.packed.dequantize())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_through_safetensors(seed: int, tmp_path: Path, kind: str, bits: int) -> None:
    w = make_weight(33, 200, bits, 64, kind, act_order=kind == "zero")
    state = {**w.packed.state_dict(), "a": torch.zeros(3, dtype=torch.uint8)}  # "a" shifts the others in the file
    save_file(state, tmp_path / "weight.safetensors", w.packed.metadata)
    with safe_open(tmp_path / "weight.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name != "a"}  # noqa: SIM118
        loaded = PackedWeight.from_state_dict(tensors, file.metadata())
    assert_unpacks(w, loaded)
    assert torch.equal(loaded.dequantize(), w.packed.dequantize())


def test_from_state_dict_refuses() -> None:
    w = make_weight(20, 100).packed
    state, metadata = w.state_dict(), w.metadata
    codes = torch.zeros_like(state["scale"], dtype=torch.uint8)
    without = {name: tensor for name, tensor in state.items() if name != "scale"}
    for tensors, numbers, message in (
        (state, metadata | {"layout": "other"}, "layout: expected"),
        (state, metadata | {"bits": "8"}, "q: expected"),
        (state, metadata | {"n": "40"}, "q: expected"),
        (state, metadata | {"k": "many"}, "k: expected a number, got many"),
        (state, {name: text for name, text in metadata.items() if name != "bits"}, "bits: expected a number, got None"),
        (state | {"perm": torch.zeros(100, dtype=torch.int64)}, metadata, "perm: expected each of 0 to 99 once"),
        (state | {"perm": torch.arange(100) + 1}, metadata, "perm: expected values from 0 to 99"),
        (state, metadata | {"group_size": "32"}, "scale: expected"),
        (without, metadata, "scale: expected"),
        (state | {"q": state["q"].to(torch.int8)}, metadata, "q: expected"),
        (state | {"zero": state["scale"]}, metadata, "zero: expected"),
        (state | {"q": state["q"][:1]}, metadata, "q: expected"),
        (state, metadata | {"group_size": "0"}, "group_size: expected -1 or at least 1"),
        (state, metadata | {"n": "-3"}, "n: expected at least 0"),
        (state | {"zero": codes, "offset": state["scale"]}, metadata, "offset: expected None with zero"),
        (state | {"q": state["q"].mT.contiguous().mT}, metadata, "q: expected contiguous memory"),
    ):
        with pytest.raises(ValueError, match=f"epiloq.PackedWeight: {message}"):
            PackedWeight.from_state_dict(tensors, numbers)


def arguments(**changes: Any) -> dict[str, Any]:
    valid = {"q": torch.zeros(6, 80, dtype=torch.int32), "scale": torch.ones(6, 3), "bits": 4, "group_size": 32}
    return {**valid, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits: expected one of .*got 5"),
        ({"group_size": 0}, "group_size: expected -1 or at least 1, got 0"),
        ({"q": torch.zeros(6, 80)}, "q: expected integers, got torch.float32"),
        ({"q": torch.zeros(6, 80, dtype=torch.bool)}, "q: expected integers"),
        ({"q": torch.zeros(480, dtype=torch.int32)}, "q: expected 2 dimensions"),
        ({"q": torch.full((6, 80), 8)}, "q: expected values from -8 to 7, got 8"),
        ({"q": torch.full((6, 80), -9)}, "q: expected values from -8 to 7, got -9"),
        (
            {"q": torch.full((6, 80), -1), "zero": torch.zeros(6, 3, dtype=torch.int8)},
            "q: expected values from 0 to 15",
        ),
        ({"q": torch.full((6, 80), 200), "bits": 8}, "q: expected values from -128 to 127"),
        ({"scale": torch.ones(6, 2)}, r"scale: expected \[6, 3\]"),
        ({"scale": torch.ones(3, 6)}, r"scale: expected \[6, 3\]"),
        ({"scale": torch.ones(6, 3).double()}, "scale: expected float16, bfloat16 or float32"),
        ({"scale": torch.ones(6, 3, device="meta")}, "scale: expected .*cpu.*meta"),
        ({"zero": torch.zeros(6, 3)}, "zero: expected integers"),
        ({"zero": torch.full((6, 3), 17)}, "zero: expected values from 0 to 16, got 17"),
        ({"zero": torch.full((6, 3), -1)}, "zero: expected values from 0 to 16, got -1"),
        ({"zero": torch.zeros(6, 4, dtype=torch.int32)}, r"zero: expected \[6, 3\]"),
        ({"offset": torch.zeros(6, 3).half()}, "offset: expected the scale's torch.float32"),
        ({"zero": torch.zeros(6, 3).int(), "offset": torch.zeros(6, 3)}, "offset: expected None with zero"),
        ({"perm": torch.arange(79)}, r"perm: expected \[80\]"),
        ({"perm": torch.arange(80) // 2}, "perm: expected each of 0 to 79 once"),
        ({"perm": torch.arange(80) - 1}, "perm: expected values from 0 to 79"),
        ({"perm": torch.arange(80).float()}, "perm: expected integers"),
        ({"bits": 4.0}, "bits: expected one of .*got 4.0"),
        ({"group_size": "32"}, "group_size: expected -1 or at least 1, got '32'"),
        ({"q": torch.full((6, 80), 2**16 - 1).to(torch.uint16)}, "q: expected values from 0 to 7, got 65535"),
        ({"q": torch.full((6, 80), -1).view(torch.uint64)}, "q: expected values from"),
    ],
)
def test_pack_weight_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^epiloq.pack_weight: {message}"):
        epiloq.pack_weight(**arguments(**changes))


@pytest.mark.parametrize("name", ["q", "scale", "zero", "offset", "perm"])
def test_pack_weight_wants_tensors(name: str) -> None:
    with pytest.raises(TypeError, match=f"^epiloq.pack_weight: {name}: expected a tensor, got list"):
        epiloq.pack_weight(**arguments(**{name: [1]}))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.int64])
def test_any_integers(seed: int, dtype: torch.dtype) -> None:
    w = make_weight(20, 100, 4, 32, "zero", act_order=True)
    assert w.zero is not None and w.perm is not None
    q, zero, perm = (t.to(dtype) for t in (w.q, w.zero, w.perm))
    again = epiloq.pack_weight(q, w.scale, zero, bits=4, group_size=32, perm=perm)
    assert_unpacks(w, again)
    assert torch.equal(again.dequantize(), w.packed.dequantize())


def test_to_dtype_does_not_move() -> None:
    with pytest.raises(TypeError):
        make_weight(20, 100).packed.to(torch.float16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype: expected float16, bfloat16 or float32"):
        PackedWeight.empty(3, 5, 4, 32, dtype=torch.float64)


def test_zero_points_of_old_gptq_files() -> None:
    """Those store zero - 1: a stored 15 stands for 16."""
    w = epiloq.pack_weight(**arguments(zero=torch.full((6, 3), 16)))
    assert torch.equal(w.dequantize(), torch.full((6, 80), -16.0))


def test_arguments_are_not_modified(seed: int) -> None:
    q, scale, perm = torch.randint(-8, 8, (16, 128), dtype=torch.int8), torch.rand(16, 1), torch.randperm(128)
    before = [t.clone() for t in (q, scale, perm)]
    w = epiloq.pack_weight(q, scale, bits=4, group_size=128, perm=perm)
    restored = w.dequantize()
    assert all(torch.equal(a, b) for a, b in zip((q, scale, perm), before, strict=True))
    for tensor in (q, scale, perm):
        tensor.zero_()
    assert torch.equal(w.dequantize(), restored)


def test_repr_and_bytes() -> None:
    w = make_weight(100, 250, 4, 128, "zero", act_order=True).packed
    assert repr(w) == (
        "PackedWeight([100, 250], 4 bits, group_size=128, zero points, torch.float16 scales, activation order, cpu)"
    )
    assert w.nbytes == 112 * 256 // 2 + 112 * 2 * 2 + 112 * 2 + 250 * 8
    with pytest.raises(AttributeError):
        w.bits = 8  # type: ignore[misc]
    buffer = io.BytesIO()
    torch.save(w.state_dict(), buffer)
    buffer.seek(0)
    loaded = PackedWeight.from_state_dict(torch.load(buffer), w.metadata)
    assert torch.equal(loaded.dequantize(), w.dequantize())


def test_packing_is_quick() -> None:
    """A weight of 117 million in a second or two; here a fourteenth of it, in time of this process alone."""
    q, scale = torch.zeros(2048, 4096, dtype=torch.int8), torch.ones(2048, 32)
    start = time.process_time()
    epiloq.pack_weight(q, scale, bits=4, group_size=128)
    assert time.process_time() - start < 2  # of about 0.04 on one core
