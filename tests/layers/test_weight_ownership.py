"""Which layers share a weight, where addresses do not tell: freed, wrapped, computed and cut weights, and none."""

from __future__ import annotations

import warnings
from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

import epiloq
from epiloq.formats.io.architecture import distinct
from epiloq.vocabulary import find
from epiloq.weights.tensor_checks import identity


class Language(nn.Module):
    """An embedding, two layers of one size, and a head."""

    def __init__(self, vocabulary: int = 24, size: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.down(self.up(self.embed(tokens))))


def wrapped(model: nn.Module) -> nn.Module:
    """Parameters of a class that wraps other tensors and has no address, as DTensor and torchao's are."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            two = TwoTensor(parameter.detach(), parameter.detach().clone())
            setattr(module, name, nn.Parameter(two, requires_grad=False))
    return model


def freed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)
    return model


@pytest.mark.parametrize(("change", "text"), [(wrapped, "TwoTensor"), (freed, "memory has been freed")])
def test_weights_without_an_address_are_no_shared_ones(change, text: str, seed: int) -> None:  # type: ignore[no-untyped-def]
    """All of them have the address 0: none of two layers is the other's, and neither can be quantised."""
    model = change(Language())
    found = find(model)
    assert (found.embeddings, found.heads, found.tied) == (("embed",), ("lm_head",), False)
    with pytest.raises(
        ValueError, match=rf"up, down: WeightOnlyLinear: linear\.weight: expected a dense tensor.*{text}"
    ):
        epiloq.quantize_(model, "w8a16")
    with pytest.raises(ValueError, match=rf"layer 'down': Int8Linear: linear\.weight: expected.*{text}"):
        epiloq.quantize_(model, "w8a8-int8", lambda module, name: name == "down")
    with pytest.raises(ValueError, match=rf"layer 'embed': QuantizedEmbedding: embedding\.weight: .*{text}"):
        epiloq.quantize_(model, None, embedding="w8a16")


def test_files_have_every_weight_without_an_address(seed: int) -> None:
    model = wrapped(Language())
    assert distinct(model).keys() == model.state_dict().keys()


def test_ties_are_kept_in_any_module(seed: int) -> None:
    for device in ("cpu", "meta"):
        model = Language().to(device)
        model.lm_head.weight = nn.Parameter(model.embed.weight.data, requires_grad=False)
        assert find(model).tied and "lm_head.weight" not in distinct(model)


def test_a_head_that_is_a_part_of_the_embedding_keeps_its_size(seed: int) -> None:
    """It begins at the same address, as where the embedding's rows are padded."""
    model = Language()
    model.lm_head = nn.Linear(32, 20, bias=False)
    model.lm_head.weight = nn.Parameter(model.embed.weight.data[:20], requires_grad=False)
    tokens = torch.arange(5)[None]
    expected = model(tokens)
    assert not find(model).tied
    epiloq.quantize_(model, None, head="w8a16")
    assert isinstance(model.embed, nn.Embedding)
    torch.testing.assert_close(model(tokens), expected, atol=0.05, rtol=0.05)


def test_a_transposed_weight_is_another_one(seed: int) -> None:
    model = Language()
    model.down.weight = nn.Parameter(model.up.weight.data.t(), requires_grad=False)
    assert distinct(model).keys() == model.state_dict().keys()


def test_computed_weight_is_not_shared(seed: int) -> None:
    """Each is made when it is read, and the next may get its memory."""
    model = Language()
    for layer in (model.embed, model.up, model.down):
        parametrizations.weight_norm(layer)
    epiloq.quantize_(model, "w8a16")
    assert type(model.up) is type(model.down) is epiloq.nn.WeightOnlyLinear


def test_empty_tensors_are_not_shared(seed: int) -> None:
    one, other = torch.empty(0, 32), torch.empty(0, 32)
    assert identity(one) != identity(other) and identity(one) == identity(one)
    assert identity(torch.eye(2).to_sparse()) != identity(torch.eye(2).to_sparse())


def test_replaced_forward_is_kept(seed: int) -> None:
    """As hooks of accelerate and adapters replace it on the instance: what it does beside the product would be lost."""
    model = Language()

    def twice(self: nn.Linear, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, self.weight, self.bias)

    model.up.forward = MethodType(twice, model.up)  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epiloq.quantize_(model, "w8a16")
    assert any("up (its forward was replaced" in str(each.message) for each in caught)
    assert type(model.up) is nn.Linear and type(model.down) is epiloq.nn.WeightOnlyLinear


def test_layer_quantised_by_another_library_is_named(seed: int) -> None:
    """As compressed-tensors leaves its class: nn.Linear without a weight."""
    model = Language()
    packed = torch.randint(-9, 9, (32, 4), dtype=torch.int32)
    del model.up.weight
    model.up.register_parameter("weight_packed", nn.Parameter(packed, requires_grad=False))
    with pytest.raises(ValueError, match=r"layer 'up': .*expected a tensor, got none, but bias, weight_packed: open a"):
        epiloq.quantize_(model, "w8a16", lambda module, name: name == "up")
    with pytest.warns(UserWarning, match=r"left in floating point: up \(WeightOnlyLinear: linear\.weight: expected"):
        epiloq.quantize_(model, "w8a16", head="w8a16")
    assert type(model.up) is nn.Linear and type(model.down) is epiloq.nn.WeightOnlyLinear


def test_weight_shape_that_contradicts_the_layer(seed: int) -> None:
    """As structured pruning leaves some: torch multiplies by the weight as it is."""
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(24, 16))
    model[0].weight = nn.Parameter(torch.randn(24, 32))
    with pytest.warns(UserWarning, match=r"0 \(.*linear\.weight: expected .*\[16, 32\], got \[24, 32\]"):
        epiloq.quantize_(model, "w8a16")
    assert model(torch.randn(2, 32)).shape == (2, 16)
