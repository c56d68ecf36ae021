"""Random groups of compressed-tensors: which layers they match, and what their tensors represent, by the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

package = pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import match_named_modules, match_targets

from epiloq.formats.configs import compressed_tensors as ct_config
from epiloq.formats.layer_reader import reader


class Own(nn.Linear):
    """A subclass, which the name of its base class matches, too."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(2, 2), Own(2, 2)
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(2, 2), "down_proj": Own(2, 2)})


MODEL = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()]), "score": nn.Linear(2, 2)})
LAYERS = {name: module for name, module in MODEL.named_modules() if isinstance(module, nn.Linear)}
NAMES = ("score", "layers.0.q_proj", "layers.1.mlp.up_proj", "q_proj")
PATTERNS = ("re:.*q_proj", "re:score|.*up_proj", r"re:layers\.1\..*", "re:layers", "re:proj")
TARGETS = st.sampled_from([*NAMES, *PATTERNS, "Linear", "Own", "Module"])
GROUPS = st.lists(st.lists(TARGETS, min_size=1, max_size=3), min_size=1, max_size=4)


@given(GROUPS, st.lists(TARGETS, max_size=3))
@settings(max_examples=200, deadline=None)
def test_layers_that_groups_match(groups: list[list[str]], ignore: list[str]) -> None:
    """Each group has other sizes of groups, which name it."""
    sizes = {f"group_{i}": 2 << i for i in range(len(groups))}
    numbers = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            name: {"targets": targets, "weights": {**numbers, "group_size": sizes[name]}}
            for name, targets in zip(sizes, groups, strict=True)
        },
        "ignore": ignore,
    }
    by_target = {target: size for targets, size in zip(groups, sizes.values(), strict=True) for target in targets}
    matched = dict(match_named_modules(MODEL, by_target, ignore))
    rules = ct_config.parse(config)
    for name, module in LAYERS.items():
        found = rules((name, name), type(module))
        expected = by_target[match_targets(name, module, by_target)[0]] if name in matched else None
        assert (None if found is None else found.group_size) == expected, (name, groups, ignore)


@st.composite
def schemes(draw: Any) -> dict[str, Any]:
    """Numbers of weights in any combination that the package accepts."""
    kind, bits = draw(st.sampled_from([("int", b) for b in range(2, 9)] + [("float", 8), ("float", 4)]))
    strategies = {4: ["group", "tensor_group"]}.get(bits, []) if kind == "float" else []
    strategy = draw(
        st.sampled_from(strategies or ["tensor", "channel", "group", *(["block"] if kind != "int" else [])])
    )
    found = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": kind != "int" or draw(st.booleans())}
    if strategy in ("group", "tensor_group"):
        usual = {"group": 32, "tensor_group": 16}[strategy]
        found["group_size"] = usual if (kind, bits) == ("float", 4) else draw(st.sampled_from([8, 16, 32]))
    if strategy == "block":
        found["block_structure"] = draw(st.sampled_from([[16, 32], [8, 64], [128, 128]]))
    if kind == "float" and bits == 4:
        found["scale_dtype"] = {"group": "torch.uint8", "tensor_group": "torch.float8_e4m3fn"}[strategy]
    if kind == "float" and bits == 8 and found.get("group_size") == 32 and draw(st.booleans()):
        found["scale_dtype"] = "torch.uint8"
    return found


def ranges(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest value of what shares a scale."""
    rows, columns = weight.shape
    spans = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": tuple(args.block_structure or ()),
    }.get(args.strategy, (1, args.group_size))
    high, wide = (-(-size // span) for size, span in zip((rows, columns), spans, strict=True))
    padded = torch.nn.functional.pad(weight, (0, wide * spans[1] - columns, 0, high * spans[0] - rows))
    parts = padded.view(high, spans[0], wide, spans[1])
    found = parts.amin((1, 3)), parts.amax((1, 3))
    return found if args.strategy != "tensor" else (found[0].view(1), found[1].view(1))


@given(schemes(), st.integers(1, 3), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
@settings(max_examples=200, deadline=None)
def test_what_tensors_represent(
    numbers: dict[str, Any], high: int, wide: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """The package's compressor writes a layer's tensors, and says what they mean."""
    rows, columns = high * 24, wide * 64
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    args = QuantizationArgs(**numbers)
    weight = torch.randn(rows, columns, dtype=dtype)
    state: dict[str, Any] = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = 448 * 6 / weight.abs().max().float().view(1)
    scale, zero = calculate_qparams(*ranges(weight, args), args, global_scale=state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    choices = [infer_module_format(nn.Linear, scheme).value]
    if args.type == "int":
        choices.append("int-quantized")
    form = data.draw(st.sampled_from(choices))
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress(state, scheme)
    group = {"targets": ["Linear"], "weights": numbers, "format": form}
    described = ct_config.parse({"config_groups": {"group_0": group}})(("layer", "layer"), nn.Linear)
    assert described is not None
    found = reader(described).weight({name: t.contiguous() for name, t in tensors.items()}, (rows, columns))
    expected = compressor.decompress(tensors, scheme)["weight"].float()
    # The package multiplies in the type of the scales, and FP4 and MXFP8 in bfloat16.
    exact = expected.dtype == torch.float32 and dtype == torch.float32 and scale.dtype == torch.float32
    in_float32 = exact and not form.startswith(("nvfp4", "mxfp4", "mxfp8"))
    torch.testing.assert_close(found.dequantize(), expected, rtol=1e-6 if in_float32 else 2**-7, atol=1e-7)
