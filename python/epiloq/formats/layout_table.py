"""Table of the layouts of quantised layers' tensors, and their conversions from and to weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from epiloq.formats.configs import compressed_tensors as ct_config
from epiloq.formats.configs import fp8
from epiloq.formats.configs import modelopt as modelopt_config
from epiloq.formats.configs import mxfp4 as mxfp4_config
from epiloq.formats.configs import quark as quark_config
from epiloq.formats.configs import torchao as torchao_config
from epiloq.formats.description import INT8_OF_BITSANDBYTES, TABLE_OF_BITSANDBYTES, TORCHAO_OFFSETS, Description
from epiloq.formats.layouts import awq, bitsandbytes, compressed_tensors, float4, float8, gptq, int4_bytes
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.weights import Weight, exact, on_grid

Tensors: TypeAlias = Mapping[str, Tensor]
Shape: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Conversions between the tensors of one layout and a weight.

    marker
        The tensor that identifies a quantised layer, by the last part of its name.
    parts
        Every tensor that a layer may have other than its bias, by the last part of its name.
    from_tensors
        The weight that a layer's tensors represent, given its shape ``[N, K]``. Raises FormatError for inconsistent
        tensors.
    to_tensors
        The inverse, given the model's dtype. Raises FormatError for what the layout cannot represent.
    check
        Raises FormatError for tensors with wrong dtypes or shapes; values are not read.
    unused
        Further tensors that a layer may have and that nothing uses.
    """

    marker: str
    parts: Callable[[Description], frozenset[str]]
    from_tensors: Callable[[Tensors, Description, Shape], Weight]
    to_tensors: Callable[[Weight, Description, torch.dtype], dict[str, Tensor]]
    check: Callable[[Tensors, Description, Shape], object] = lambda tensors, described, shape: None
    unused: Callable[[Description], frozenset[str]] = lambda described: frozenset()


def _integers(marker: str) -> Layout:
    def write(weight: Weight, described: Description, dtype: torch.dtype) -> dict[str, Tensor]:
        value = on_grid(weight, ct_config.METHOD)
        # Its reader multiplies in the scale's dtype, then rounds to the model's.
        holds = exact(value.scale, (dtype, torch.float32), ct_config.METHOD)
        return compressed_tensors.to_tensors(value, described, holds)

    return Layout(marker, compressed_tensors.parts, compressed_tensors.from_tensors, write)


def _gptq(version: str) -> Layout:
    def read(tensors: Tensors, described: Description, shape: Shape) -> Weight:
        assert described.grid is not None
        return gptq.from_tensors(tensors, described.grid, version, shape, described.ordered)

    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    return Layout("qweight", lambda _: parts, read, lambda weight, *_: gptq.to_tensors(weight, version))


def _awq(version: str) -> Layout:
    def read(tensors: Tensors, described: Description, shape: Shape) -> Weight:
        return awq.from_tensors(tensors, described.group_size, version, shape)

    parts = frozenset({"qweight", "qzeros", "scales"})
    return Layout("qweight", lambda _: parts, read, lambda weight, *_: awq.to_tensors(weight, version))


def _float8(names: float8.Names) -> Layout:
    return Layout(
        names.scale,
        names.parts,
        lambda tensors, described, shape: float8.from_tensors(tensors, described, shape, names),
        lambda weight, described, _: float8.to_tensors(weight, described, names),
        lambda tensors, described, shape: float8.checked(tensors, described, shape, names),
    )


def _float4(names: float4.Names) -> Layout:
    return Layout(
        names.scale,
        names.parts,
        lambda tensors, described, shape: float4.from_tensors(tensors, described, shape, names),
        lambda weight, described, _: float4.to_tensors(weight, described, names),
        lambda tensors, described, shape: float4.checked(tensors, described, shape, names),
        names.unused,
    )


_DEEPSEEK_FP4 = float4.Names("weight", fp8.SCALE, inputs=None, codes_dtype=torch.int8, scale_dtype=torch.float8_e8m0fnu)


def _only_read(weight: Weight, described: Description, dtype: torch.dtype) -> dict[str, Tensor]:
    raise FormatError(f"{described.layout}: can only be read; epiloq convert writes the directory in another format")


def _to_int4(weight: Weight, described: Description, dtype: torch.dtype) -> dict[str, Tensor]:
    value = on_grid(weight, described.layout)
    holds = exact(value.scale, (dtype, torch.float32), described.layout)
    return int4_bytes.to_tensors(value, described, holds)


_OF_TORCHAO = {"_weight_qdata": "weight", "_weight_scale": "weight_scale", "_weight_zero_point": "weight_zero_point"}


def _torchao(layout: str, inner: Layout) -> Layout:
    """The tensors of another layout under torchao's names; a scale of the whole weight may have two dimensions."""

    def renamed(tensors: Tensors, described: Description) -> dict[str, Tensor]:
        found = {_OF_TORCHAO[name]: tensor for name, tensor in tensors.items()}
        one = described.strategy == "tensor"
        return {name: t.reshape(1) if one and name != "weight" and t.numel() == 1 else t for name, t in found.items()}

    def read(tensors: Tensors, described: Description, shape: Shape) -> Weight:
        return inner.from_tensors(renamed(tensors, described), replace(described, layout=layout), shape)

    def check(tensors: Tensors, described: Description, shape: Shape) -> object:
        return inner.check(renamed(tensors, described), replace(described, layout=layout), shape)

    return Layout("_weight_qdata", lambda _: frozenset(_OF_TORCHAO), read, _only_read, check)


def _halves() -> Layout:
    names = frozenset(_OF_TORCHAO)
    return Layout("_weight_qdata", lambda _: names, int4_bytes.by_columns, _only_read, int4_bytes.check_columns)


def _quark(kind: str, in_awqs: bool) -> Layout:
    signed = not kind.startswith("u")

    def read(tensors: Tensors, described: Description, shape: Shape) -> Weight:
        return awq.from_quark(tensors, described, shape, signed, in_awqs)

    return Layout("weight_scale", awq.parts_of_quark, read, _only_read, awq.check_quark)


LAYOUTS: dict[str, Layout] = {
    INT8_OF_BITSANDBYTES: Layout(
        "SCB", lambda _: bitsandbytes.INT8_PARTS, bitsandbytes.int8_weight, _only_read, bitsandbytes.check_int8
    ),
    TABLE_OF_BITSANDBYTES: Layout(
        "weight.quant_map",
        lambda _: bitsandbytes.PARTS,
        bitsandbytes.table_weight,
        _only_read,
        bitsandbytes.check_table,
    ),
    ct_config.PACKED: _integers("weight_packed"),
    ct_config.INTEGER: _integers("weight_scale"),
    **{layout: _float4(float4.Names()) for layout in (ct_config.NVFP4, ct_config.MXFP4)},
    ct_config.FLOAT: _float8(float8.Names(zeros=("weight_zero_point", "input_zero_point"))),
    **dict.fromkeys((ct_config.MXFP8, modelopt_config.MXFP8), _float8(float8.Names(exponents=True, in_bytes=True))),
    fp8.BLOCKS: _float8(float8.Names("weight_scale_inv", exponents=True)),
    fp8.BY_SCALE[fp8.BLOCKS]: _float8(float8.Names(fp8.SCALE, exponents=True)),
    fp8.EXPERTS: _float4(replace(_DEEPSEEK_FP4, scale="weight_scale_inv")),
    fp8.BY_SCALE[fp8.EXPERTS]: _float4(_DEEPSEEK_FP4),
    fp8.TENSORS: _float8(float8.Names()),
    fp8.SCALARS: _float8(float8.Names("weight_scale_inv", "activation_scale", scalar=True)),
    fp8.ROWS: _float8(float8.Names(limit="input_scale_ub")),
    **dict.fromkeys((modelopt_config.TENSORS, quark_config.TENSORS), _float8(float8.Names(scalar=True))),
    **dict.fromkeys((modelopt_config.ROWS, quark_config.ROWS), _float8(float8.Names(flat=True))),
    **{layout: _quark(kind, in_awqs) for (kind, in_awqs), layout in quark_config.INTEGERS.items()},
    modelopt_config.BLOCKS: _float8(float8.Names(apart=True)),
    **{
        layout: Layout(
            "weight_scale",
            lambda _: int4_bytes.PARTS,
            int4_bytes.from_tensors,
            _to_int4,
            int4_bytes.check,
            lambda _, aside=aside: aside,  # type: ignore[misc]
        )
        for layout, aside in int4_bytes.ASIDE.items()
    },
    **{
        layout: _float4(float4.Names("weight", whole="weight_scale_2", reciprocal=False, inputs="input_scale"))
        for layout in (modelopt_config.NVFP4, modelopt_config.MXFP4)
    },
    **{layout: _float4(float4.Names("weight", inputs=None)) for layout in (quark_config.MXFP4, mxfp4_config.LAYOUT)},
    torchao_config.INTEGERS: _torchao(ct_config.INTEGER, _integers("weight_scale")),
    **dict.fromkeys((torchao_config.HALVES, TORCHAO_OFFSETS), _halves()),
    torchao_config.FLOATS: _torchao(ct_config.FLOAT, _float8(float8.Names(zeros=("weight_zero_point",)))),
    **{version: _gptq(version) for version in gptq.VERSIONS},
    **{version: _awq(version) for version in awq.VERSIONS},
}
