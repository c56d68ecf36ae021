"""Experts of other formats as epiloq's, from the tensors that engines hold after loading; imports no engine.

Engines stack the matrices of a rank's experts: `gate_up` ``[E, 2 I, H]``, gate before up, and `down` ``[E, H, I]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from epiloq import _core
from epiloq.formats.layouts.words import unpack
from epiloq.nn import Fp4Linear, Fp8BlockLinear, Fp8Linear, Int8Linear, WeightOnlyLinear
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.nn.experts.fp4_experts import Fp4Experts
from epiloq.nn.experts.fp8_block_experts import Fp8BlockExperts
from epiloq.nn.experts.gated_experts import GatedExperts
from epiloq.nn.experts.kind import Kind
from epiloq.nn.experts.packed_experts import PackedExperts
from epiloq.nn.experts.packed_fp4_experts import PackedFp4Experts
from epiloq.nn.experts.row_experts import Fp8Experts, Int8Experts
from epiloq.weights.fp4 import FORMATS
from epiloq.weights.packed_fp4_weight import pack_fp4_weight
from epiloq.weights.packed_layout import PANEL_ROWS
from epiloq.weights.packed_weight import PackedWeight, pack_weight

MXFP4_BLOCK, NVFP4_BLOCK = (FORMATS[name].block_size for name in ("mxfp4", "nvfp4"))


@dataclass(frozen=True)
class Sizes:
    """Number of a rank's experts, hidden size, and the rank's part of the intermediate size."""

    experts: int
    hidden: int
    intermediate: int

    def reason_against(self) -> str | None:
        """Why they cannot be stacked without padding between gate and up; None if they can."""
        if self.hidden % PANEL_ROWS or self.intermediate % PANEL_ROWS:
            return f"expected multiples of {PANEL_ROWS}, got hidden size {self.hidden} and {self.intermediate} per rank"
        return None


def matrix_of_words(
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    *,
    bits: int,
    group_size: int,
    order: Sequence[int] | None = None,
    by_output: bool = False,
) -> PackedWeight:
    """Pack one expert's matrix ``[N, K]`` from int32 words.

    Args:
        words: ``[K / f, N]`` with f fields of `bits` bits per word, or with `by_output` ``[K, N / f]``.
        scale: ``[G, N]`` for G groups.
        zero: ``[G, N / f]`` with the zero points themselves, or None, which means 2^(bits - 1).
        group_size: columns that share a scale; -1 for the whole row.
        order: the order of fields in a word, as for `unpack`.
        by_output: whether a word holds neighbouring outputs (AWQ) rather than inputs (GPTQ).
    """
    n = scale.shape[1]
    if by_output:
        q = unpack(words, bits, n, order).t().contiguous()
    else:
        q = unpack(words.t().contiguous(), bits, words.shape[0] * 32 // bits, order)
    points = None
    if zero is None:
        q = (q.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    else:
        points = unpack(zero.contiguous(), bits, n, order).t().contiguous()
    return pack_weight(q, scale.t().contiguous(), points, bits=bits, group_size=group_size)


def packed_experts(
    sizes: Sizes, gate_up: Iterable[PackedWeight], down: Iterable[PackedWeight], act_fn: nn.Module | None = None
) -> GatedExperts:
    """Experts with packed weights, from the matrices ``[2 I, H]`` and ``[H, I]`` of each."""
    tensors: dict[str, Tensor] = {}
    options = {}
    for name, matrices in (("gate_up", gate_up), ("down", down)):
        each = list(matrices)
        first = each[0]
        options = {
            "group_size": first.group_size,
            "zeros": "none" if first.zero is None else "zero",
            "dtype": first.scale.dtype,
            "bits": first.bits,
        }
        for part in first.state_dict():
            tensors[f"{name}.weight_{part}"] = torch.cat([packed.state_dict()[part] for packed in each])
    return _assigned(Kind(WeightOnlyLinear, PackedExperts, options), sizes, tensors, act_fn)


def fp8_block_experts(
    sizes: Sizes, gate_up: Sequence[Tensor], down: Sequence[Tensor], act_fn: nn.Module | None = None
) -> GatedExperts:
    """Experts of float8_e4m3fn values and scales per block of 128 x 128, which they share with the tensors given; the
    intermediate size is a multiple of 128."""
    if sizes.intermediate % FP8_BLOCK:
        raise ValueError(f"intermediate: expected a multiple of {FP8_BLOCK}, got {sizes.intermediate}")
    tensors = {}
    for name, (values, scale) in (("gate_up", gate_up), ("down", down)):
        tensors[f"{name}.weight_q"] = values
        tensors[f"{name}.weight_scale_inv"] = scale.float()
    return _assigned(Kind(Fp8BlockLinear, Fp8BlockExperts), sizes, tensors, act_fn)


def row_experts(
    sizes: Sizes, gate_up: Sequence[Tensor], down: Sequence[Tensor], act_fn: nn.Module | None = None
) -> GatedExperts:
    """Experts of int8 or float8_e4m3fn values, shared with the tensors given, and scales per expert or per output.

    Scales have E, 2 E (one each for gate and up) or E N elements. Activations are quantised per token.
    """
    tensors = {}
    for name, (values, scale) in (("gate_up", gate_up), ("down", down)):
        experts, rows = values.shape[:2]
        each = scale.float().reshape(experts, -1)
        tensors[f"{name}.weight_q"] = values
        tensors[f"{name}.weight_scale"] = each.repeat_interleave(rows // each.shape[1], 1)
    if gate_up[0].dtype == torch.int8:
        kind = Kind(Int8Linear, Int8Experts, {"activation": "dynamic", "symmetric": True})
    else:
        kind = Kind(Fp8Linear, Fp8Experts, {"activation": "token", "weight": "channel"})
    return _assigned(kind, sizes, tensors, act_fn)


def fp4_experts(
    sizes: Sizes, gate_up: Sequence[Tensor], down: Sequence[Tensor], act_fn: nn.Module | None = None
) -> GatedExperts:
    """Experts of E2M1 codes uint8 ``[E, N, K / 2]`` and scales per block, uint8 (MXFP4) or float8_e4m3fn (NVFP4).

    NVFP4 also has reciprocals of global scales, float32: ``[E, 2]`` for gate and up, ``[E]`` for down.
    """
    tensors: dict[str, Tensor] = {}
    for name, (codes, scales, *divisor), k in (
        ("gate_up", gate_up, sizes.hidden),
        ("down", down, sizes.intermediate),
    ):
        packed = pack_fp4_weight(codes.flatten(0, 1), scales.flatten(0, 1), in_features=k)
        tensors |= {f"{name}.weight_q": packed.q, f"{name}.weight_scale": packed.scale}
        tensors |= {f"{name}.weight_global_scale": given.flatten() for given in divisor}
    kind = Kind(Fp4Linear, PackedFp4Experts, {"format": packed.format, "reciprocal": True})
    return _assigned(kind, sizes, tensors, act_fn)


def gpt_oss_experts(sizes: Sizes, gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> Fp4Experts:
    """GPT-OSS's experts in MXFP4, from the codes, scales and biases of each product.

    They are uint8 ``[E, N, K / 2]`` and ``[E, N, K / 32]``, and floating-point ``[E, N]``; rows of gate and up
    alternate.
    """
    tensors = {}
    for name, (codes, scales, bias) in (("gate_up_proj", gate_up), ("down_proj", down)):
        tensors[f"{name}_blocks"] = codes.unflatten(-1, (-1, MXFP4_BLOCK // 2))
        tensors |= {f"{name}_scales": scales, f"{name}_bias": bias}
    outline = Fp4Experts(sizes.experts, sizes.hidden, sizes.intermediate, device="meta", dtype=gate_up[2].dtype)
    return outline.from_blocks(tensors).eval()


def _assigned(kind: Kind, sizes: Sizes, tensors: Mapping[str, Tensor], act_fn: nn.Module | None) -> GatedExperts:
    module = GatedExperts(kind, sizes.experts, sizes.hidden, sizes.intermediate, act_fn=act_fn, device="meta")
    module.load_state_dict({name: tensor.detach() for name, tensor in tensors.items()}, assign=True)
    return module.eval()


def routed_to_part(module: GatedExperts | Fp4Experts) -> nn.Module:
    """The module for expert parallelism: it accepts the index E as well, for rows of experts in other processes."""
    module.part, module.whole = range(module.experts), module.experts + 1
    return module


def reason_against_graphs(sizes: Sizes, bits: int, group_size: int, dtype: torch.dtype, capability: int) -> str | None:
    """Why a CUDA graph cannot record such packed experts; None if one kernel multiplies them all.

    Otherwise they are multiplied one after the other, and the host reads how many rows each has. `capability` is that
    of the device, 90 for 9.0.
    """
    arch = next((f"sm{known}" for known in (90, 80) if known <= capability), "sm75")
    for n, k in ((2 * sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)):
        found = _core.explain_grouped_packed_mm_problem(
            m=sizes.experts,
            n=n,
            k=k,
            experts=sizes.experts,
            bits=bits,
            group_size=group_size,
            dtype=str(dtype).removeprefix("torch."),
            arch=arch,
        )
        if found.startswith("no kernel"):
            weights = f"{bits} bits in groups of {group_size}"
            return f"no kernel multiplies all experts of {n} x {k} with {weights} and {dtype}"
    return None
