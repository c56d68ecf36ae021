"""Layers as other tools pack them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from foreign_checkpoints import Integers, Layer, interleaved, words

Pack = Callable[[str, nn.Linear], "Layer | None"]


def gptq(
    bits: int = 4,
    length: int = 32,
    less: int = 1,
    symmetric: bool = False,
    order: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Pack:
    """GPTQ's tensors without ``g_idx`` (unless in activation order), zero points less 1 or as they are."""

    def pack(name: str, linear: nn.Linear) -> Layer:
        made = Integers.random(linear.out_features, linear.in_features, length, bits, dtype)
        if symmetric:
            made.zero = torch.full_like(made.zero, 1 << (bits - 1))
        groups = {}
        if order:
            made.groups = made.groups[torch.randperm(linear.in_features)]
            groups = {"g_idx": made.groups.int()}
        return {
            "qweight": words(made.q.numpy().T.copy().T, bits).T.contiguous(),
            "qzeros": words((made.zero - less).T.numpy(), bits),
            "scales": made.scale.T.contiguous(),
            **groups,
        }, made.weight

    return pack


def awq(name: str, linear: nn.Linear, dtype: torch.dtype = torch.float16) -> Layer:
    made = Integers.random(linear.out_features, linear.in_features, 32, dtype=dtype)
    tensors = {"qweight": interleaved(made.q), "qzeros": interleaved(made.zero), "scales": made.scale.T.contiguous()}
    return tensors, made.weight


def packed(bits: int, length: int, symmetric: bool, *, zeros: bool = False, order: bool = False) -> Pack:
    """``pack-quantized``, perhaps with zero points that say nothing, or in activation order."""

    def pack(name: str, linear: nn.Linear) -> Layer:
        size = linear.in_features if length == -1 else length
        made = Integers.random(linear.out_features, linear.in_features, size, bits, torch.float32)
        if order:
            made.groups = made.groups[torch.randperm(linear.in_features)]
        if symmetric:
            made.zero = torch.full_like(made.zero, 1 << (bits - 1))
        tensors = {
            "weight_packed": words(made.q.numpy(), bits),
            "weight_scale": made.scale,
            "weight_shape": torch.tensor([linear.out_features, linear.in_features]),
        }
        if zeros and symmetric:  # As earlier versions of the package left them.
            tensors["weight_zero_point"] = torch.zeros(made.zero.shape, dtype=torch.int8)
        elif not symmetric:
            tensors["weight_zero_point"] = words(made.zero.T.numpy(), bits).T.contiguous()
        if order:
            tensors["weight_g_idx"] = made.groups.int()
        return tensors, made.weight

    return pack


def integers(strategy: str, symmetric: bool = True, static: bool = False, bits: int = 8) -> Pack:
    """``int-quantized`` of 8 bits, or fewer: a scale for the tensor, channels or groups of 32."""

    def pack(name: str, linear: nn.Linear) -> Layer:
        rows, columns = linear.out_features, linear.in_features
        groups = columns // 32 if strategy == "group" else 1
        q = torch.randint(1 - (1 << (bits - 1)), 1 << (bits - 1), (rows, columns), dtype=torch.int8)
        shape = (1,) if strategy == "tensor" else (rows, groups)
        scale = (torch.rand(shape) * 1e-3 + 5e-4) * (1 << (8 - bits))
        zero = torch.randint(-9, 9, shape, dtype=torch.int8) if not symmetric else torch.zeros(shape, dtype=torch.int8)
        wide = [t.float().expand(rows, 1) if strategy == "tensor" else t.float() for t in (scale, zero)]
        spread, shift = (t.repeat_interleave(columns // groups, 1) for t in wide)
        tensors = {"weight": q, "weight_scale": scale} | ({} if symmetric else {"weight_zero_point": zero})
        return tensors | ({"input_scale": torch.full((1,), 0.03)} if static else {}), (q - shift) * spread

    return pack


def fp8(scale: str, rows: int, columns: int, **more: tuple[str, tuple[int, ...]]) -> Pack:
    """FP8 weights with a scale, of this name, for so many rows and columns (-1: all); `more` tensors by kind."""

    def pack(name: str, linear: nn.Linear) -> Layer:
        q = torch.randn(linear.out_features, linear.in_features).to(torch.float8_e4m3fn)
        spans = [size if span == -1 else span for span, size in zip((rows, columns), q.shape, strict=True)]
        count = [-(-size // span) for size, span in zip(q.shape, spans, strict=True)]
        values = torch.rand(*count) * 0.05 + 0.05
        spread = values.repeat_interleave(spans[0], 0).repeat_interleave(spans[1], 1)[: q.shape[0], : q.shape[1]]
        shape = more.get("shape", ("", tuple(count)))[1]
        found = {"weight": q, scale: values.reshape(shape)}
        if "inputs" in more:
            found[more["inputs"][0]] = torch.full(more["inputs"][1], 0.01)
        return found, q.float() * spread

    return pack


def mxfp8(name: str, linear: nn.Linear) -> Layer:
    """FP8 weights with the byte of an exponent for each 32 columns of a row."""
    q = torch.randn(linear.out_features, linear.in_features).to(torch.float8_e4m3fn)
    exponents = torch.randint(119, 124, (q.shape[0], -(-q.shape[1] // 32)), dtype=torch.uint8)
    factors = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)[:, : q.shape[1]]
    return {"weight": q, "weight_scale_inv": exponents}, q.float() * factors


def mxfp8_of_compressed_tensors(name: str, linear: nn.Linear) -> Layer:
    """The same under that package's name; ModelOpt has it, too."""
    tensors, weight = mxfp8(name, linear)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, weight


def by_name(*choices: tuple[str, Pack | None]) -> Pack:
    """The first of some functions whose text is in a layer's name."""

    def pack(name: str, linear: nn.Linear) -> Layer | None:
        chosen = next(pack for text, pack in choices if text in name)
        return None if chosen is None else chosen(name, linear)

    return pack
