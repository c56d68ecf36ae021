"""epiloq.nn.GatedExperts and ExpertLinears: against float64 and each other, and their state."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epiloq.formats import module_kinds
from epiloq.nn import (
    ExpertLinears,
    Fp4Linear,
    Fp8BlockLinear,
    Fp8Linear,
    GatedExperts,
    Int8Linear,
    OnlineQuantLinear,
    W4A8Fp4Linear,
    W4A8Linear,
    WeightOnlyLinear,
)
from epiloq.nn.experts.kind import Kind
from gated_problems import (
    KINDS,
    TOP_K,
    Make,
    expected,
    first_products,
    floats,
    gates_of,
    quantised,
    routed,
    together,
    weight_of,
)
from reference import typical_error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (200, 72), (17, 150)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_against_float64(hidden: int, inner: int, dtype: torch.dtype, kind: str, seed: int, device: str) -> None:
    make, module, grid = KINDS[kind]
    apart = quantised(floats(hidden, inner), make)
    x, index, weights = routed(9, hidden, dtype)
    found = together(apart).to(device)
    assert type(found.down) is module
    products: list[Tensor] = []
    multiply = found.gate_up.multiply

    def watched(*args: Any, **options: Any) -> Tensor:
        products.append(multiply(*args, **options))
        return products[-1]

    found.gate_up.multiply = watched  # type: ignore[method-assign]
    y = found(x.to(device), index.to(device), weights.to(device))
    assert (y.shape, y.dtype) == (x.shape, dtype)
    # In 16 bits each product is rounded, and SM90's tensor cores add FP8 up to 2^-13 of a sum's span. That moves gates
    # and ups, of which values beside a tie then round the other way, one a token or more: so the second product is
    # compared from the first one on.
    exact = device == "cpu" or kind == "int8"
    # On CUDA few tokens of W4A8 are bfloat16, and so are those of FP4 weights, see docs/numerics.md.
    widens = kind.startswith(("w4a8", "mxfp4-", "nvfp4-"))
    in_float16 = 1.5e-2 if widens and device != "cpu" else 2e-3
    bound = {torch.float32: 1e-5 if exact else 5e-3, torch.float16: in_float16, torch.bfloat16: 1.5e-2}[dtype]
    gates = gates_of(found, products[0], index)
    assert typical_error(gates.double(), first_products(apart, x, index, grid)) < bound
    reference = expected(apart, gates, index, weights, grid)
    assert typical_error(y.cpu().double(), reference) < bound
    # A value of a few tokens rounds the other way, by a step of 127 in int8, by a sixteenth of itself in FP8.
    in_float32 = 5e-3 if kind == "int8" else 2e-2
    assert float((y.cpu().double() - reference).norm() / reference.norm()) < (
        in_float32 if dtype == torch.float32 else 6e-2
    )


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-token", "int8"])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_equals_separate_layers(tokens: int, kind: str, seed: int, device: str) -> None:
    """The same weights one linear layer at a time; exponentials differ in last bits, and so a few rounded values.

    In 16 bits a fused gate is rounded once less before it is quantised.
    """
    make, dtype = KINDS[kind][0], torch.float32 if device == "cpu" else torch.bfloat16
    apart = quantised(floats(136, 72, dtype), make).to(device)
    whole = together(apart)
    arguments = [t.to(device) for t in routed(tokens, 136, dtype)]
    one, other = apart(*arguments), whole(*arguments)
    assert one.shape == other.shape == (tokens, 136)
    assert (one - other).norm() <= (2e-2 if dtype == torch.float32 else 6e-2) * one.norm()


def test_float_experts_are_a_plain_loop(seed: int) -> None:
    """And another activation than SiLU is kept, quantised too."""
    apart = floats(40, 24, act_fn=nn.ReLU())
    x, index, weights = routed(11, 40, torch.float32)
    result = torch.zeros(11, 40)
    for token in range(11):
        for j in range(TOP_K):
            gate, up, down = apart.layers(int(index[token, j]))
            result[token] += weights[token, j] * down(nn.functional.relu(gate(x[token])) * up(x[token]))
    torch.testing.assert_close(apart(x, index, weights), result)
    eight_bits = quantised(apart, Int8Linear.from_linear)
    whole = together(eight_bits)
    assert whole.act_fn is not None and torch.equal(whole(x, index, weights), eight_bits(x, index, weights))


@pytest.mark.parametrize("kind", KINDS)
def test_state(kind: str, seed: int) -> None:
    """Stacked, and in files a matrix an expert, as the layers have it; either is loaded."""
    apart = quantised(floats(150, 72), KINDS[kind][0])
    whole, arguments = together(apart), routed(9, 150, torch.float32)
    assert {name.rpartition(".")[0] for name in whole.state_dict()} == {"gate_up", "down"}
    assert all(tensor is whole.get_parameter(name) for name, tensor in whole.state_dict(keep_vars=True).items())
    state, layers = (
        whole.file_state(),
        {
            f"{name}.{part}": tensor
            for name, layer in apart.named_modules()
            if hasattr(layer, "file_state")
            for part, tensor in layer.file_state().items()
        },
    )
    assert state.keys() == layers.keys()
    for name, tensor in layers.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)), name
    y = whole(*arguments)
    blank = together(quantised(floats(150, 72), KINDS[kind][0]))
    assert not torch.equal(blank(*arguments), y)
    blank.load_state_dict({name: tensor.clone() for name, tensor in layers.items()})
    stacked = together(quantised(floats(150, 72), KINDS[kind][0]))
    stacked.load_state_dict(whole.state_dict())
    for other in (
        blank,
        stacked,
        copy.deepcopy(whole),
        pickle.loads(pickle.dumps(whole)),
        copy.deepcopy(whole).bfloat16(),
    ):
        assert torch.equal(other(*arguments), y)
    linears = dict(whole.linears())
    assert list(linears)[:4] == ["0.gate_proj", "0.up_proj", "0.down_proj", "1.gate_proj"]
    assert repr(linears["3.down_proj"]) == repr(apart.layers(3)[2])
    assert torch.equal(weight_of(linears["3.down_proj"]), weight_of(apart.layers(3)[2]))


def test_state_that_does_not_fit(seed: int) -> None:
    whole = together(quantised(floats(64, 32), Int8Linear.from_linear))
    state = whole.file_state()
    missing = {name: tensor for name, tensor in state.items() if name != "2.up_proj.weight_scale"}
    with pytest.raises(RuntimeError, match=r"Missing key.*2.up_proj.weight_scale"):
        whole.load_state_dict(missing)
    with pytest.raises(
        RuntimeError, match=r"1.down_proj.weight_q: expected torch.int8 \[64, 32\], got torch.int8 \[64, 31\]"
    ):
        whole.load_state_dict({**state, "1.down_proj.weight": state["1.down_proj.weight"][:, :31]})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*9.down_proj.weight"):
        whole.load_state_dict({**state, "9.down_proj.weight": state["1.down_proj.weight"]})


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_a_module_without_values(kind: str, seed: int) -> None:
    """From "meta" by assigning or after `to_empty`, whose memory holds anything, where gate is padded too."""
    whole, arguments = together(quantised(floats(150, 50), KINDS[kind][0])), routed(9, 150, torch.float32)
    y = whole(*arguments)
    state = {name: tensor.clone() for name, tensor in whole.file_state().items()}
    assigned = copy.deepcopy(whole).to("meta")
    assigned.load_state_dict(state, assign=True)
    filled = copy.deepcopy(whole).to("meta").to_empty(device="cpu")
    for buffer in filled.parameters():
        buffer.view(torch.uint8).fill_(0x7E)
    filled.load_state_dict(state)
    for other in (assigned, filled):
        assert torch.equal(other(*arguments), y)


@pytest.mark.parametrize("kind", [ExpertLinears, GatedExperts])
def test_mismatching_arguments_are_refused(kind: type[ExpertLinears | GatedExperts], seed: int) -> None:
    """Among them a width that padding would make that of the weights, and experts that there are not."""
    apart = quantised(floats(64, 32), Int8Linear.from_linear)
    experts = apart if kind is ExpertLinears else together(apart)
    x, index, weights = routed(4, 64, torch.float32)
    for wrong in (x[:, :60], x.unsqueeze(0)):
        with pytest.raises(ValueError, match=rf"{kind.__name__}: hidden_states: expected shape \[T, 64\], got"):
            experts(wrong, index, weights)
    for argument, wrong_index, wrong_weights in (
        ("top_k_index", index[:3], weights[:3]),
        ("top_k_index", index.flatten(), weights),
        ("top_k_weights", index, weights[:, :1]),
    ):
        with pytest.raises(ValueError, match=rf"{kind.__name__}: {argument}: expected .* of \[4, top_k\], got"):
            experts(x, wrong_index, wrong_weights)
    for argument, wrong_index, wrong_weights in (
        ("top_k_index", weights, index),  # swapped
        ("top_k_index", index.bool(), weights),
        ("top_k_index", index.tolist(), weights),
        ("top_k_weights", index, index),
        ("top_k_weights", index, None),
    ):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}: {argument}: expected a tensor of .*, got"):
            experts(x, wrong_index, wrong_weights)
    for wrong in (-1, experts.experts):
        beyond = index.index_fill(0, torch.tensor(2), wrong)
        with pytest.raises(ValueError, match=rf"{kind.__name__}: top_k_index: expected indices from 0 to .*{wrong}"):
            experts(x, beyond, weights)


def test_compiled(seed: int) -> None:
    """Without graph breaks, so without a look at the counts; for changing numbers of tokens."""
    whole = together(quantised(floats(64, 72), KINDS["fp8-block"][0]))
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (6, 13, 2):
        arguments = routed(tokens, 64, torch.bfloat16)
        assert torch.equal(compiled(*arguments), whole(*arguments))


@pytest.mark.gpu
def test_captured(seed: int) -> None:
    """A CUDA graph, which no look at the host survives, replayed with another routing."""
    whole = together(quantised(floats(256, 128, torch.bfloat16), Fp8BlockLinear.from_linear)).cuda()
    held = [t.cuda() for t in routed(32, 256, torch.bfloat16)]
    whole(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = whole(*held)
    fresh = [t.cuda() for t in routed(32, 256, torch.bfloat16)]
    for old, new in zip(held, fresh, strict=True):
        old.copy_(new)
    graph.replay()
    assert torch.equal(y, whole(*fresh))


OPTIONS: dict[type[nn.Module], dict[str, tuple[Any, ...]]] = {
    Fp8BlockLinear: {"rows": (1, 128)},
    Fp8Linear: {"activation": ("token", "tensor", "static"), "weight": ("channel", "tensor"), "limit": (None, 0.5)},
    Int8Linear: {"activation": ("dynamic", "static"), "symmetric": (True, False)},
    Fp4Linear: {"format": ("nvfp4", "mxfp4"), "reciprocal": (True, False), "scaled_input": (True, False)},
    W4A8Fp4Linear: {"format": ("nvfp4", "mxfp4"), "activation": ("fp8", "int8", "fp8-group", "fp8-static")},
    W4A8Linear: {"activation": ("fp8", "int8"), "group_size": (32, -1), "zeros": ("none", "zero")},
    WeightOnlyLinear: {
        "bits": (2, 4, 8),
        "group_size": (32, -1),
        "zeros": ("none", "zero", "offset"),
        "scaled_input": (True, False),
    },
}


@pytest.mark.parametrize("linear", OPTIONS)
def test_no_option_is_lost(linear: Any) -> None:
    """Layers are computed together, as layers with the same options, or stay separate."""
    names, choices = OPTIONS[linear].keys(), OPTIONS[linear].values()
    together = 0
    for values in itertools.product(*choices):
        layer = linear(128, 64, False, **dict(zip(names, values, strict=True)))
        kind = Kind.of(layer)
        if kind is not None:
            again = kind.linear(128, 64, False, **kind.options)
            described = module_kinds.KINDS[linear.__name__]
            assert type(again) is linear and described.options_of(again) == described.options_of(layer)
            together += 1
    assert together > 0


def test_unsupported_kinds_stay_separate(seed: int) -> None:
    apart = floats(64, 32)
    assert GatedExperts.from_linears(apart) is None
    blocks: Make = lambda layer: OnlineQuantLinear.from_linear(layer, group_size=32)  # noqa: E731
    assert GatedExperts.from_linears(quantised(apart, blocks)) is None
    static: Make = lambda layer: Fp8Linear.from_linear(layer, activation="static", input_scale=0.1)  # noqa: E731
    assert GatedExperts.from_linears(quantised(apart, static)) is None
    mixed: Any = quantised(apart, Int8Linear.from_linear)
    mixed.get_submodule("3")["up_proj"] = Fp8Linear.from_linear(apart.layers(3)[1])
    assert GatedExperts.from_linears(mixed) is None
    arguments = routed(4, 64, torch.float32)
    assert mixed(*arguments).isfinite().all()
