"""`epiloq.explain` of matrix products by their sizes alone, without tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from epiloq import _core
from epiloq._torch.calls import is_batch_invariant
from epiloq.ops.experts import few_rows
from epiloq.ops.packed_fp4_mm import dequantised_explanation
from epiloq.ops.w4a8 import unpacked
from epiloq.ops.w4a8_mm import float8_tokens
from epiloq.weights.packed_layout import PANEL_ROWS
from epiloq.weights.tensor_checks import refuse

_SIZES = ("m", "n", "k")


def _explain_w4a8_mm(**call: Any) -> str:
    """What a call with float8 tokens and a symmetric weight runs: by M the kernel of `weight_only_mm`, the one for
    float8, or a product of the unpacked weight."""
    kernel = _core.explain_w4a8_mm_problem(**call)
    sizes, arch = (call["m"], call["k"], call.get("group_size", 128)), call.get("arch", "sm90")
    invariant = is_batch_invariant()
    if not invariant and unpacked.fits_sizes(*sizes, torch.float8_e4m3fn, lambda archs: arch in archs):
        return unpacked.explanation("integers")
    if invariant or call["m"] not in float8_tokens(call.get("group_size", 128)) or call["k"] == 0:
        return f"activations as bfloat16: {_core.explain_weight_only_mm_problem(bits=4, **call)}"
    return kernel


def _explain_packed_fp4_mm(**call: Any) -> str:
    """The kernel, unless the matrix of one expert after the other is dequantised."""
    call = {"format": "mxfp4", "dtype": "bfloat16", **call}
    if call["format"] not in ("mxfp4", "nvfp4"):
        raise ValueError(f"epiloq.packed_fp4_mm: format: expected mxfp4 or nvfp4, got {call['format']!r}")
    kernel = _core.explain_grouped_packed_mm_problem(**call)
    experts, dtype = call.get("experts"), getattr(torch, call["dtype"])
    takes = experts is None or is_batch_invariant() or _prefers_one_kernel(call)
    if takes and not kernel.startswith("no kernel"):
        return kernel
    if is_batch_invariant():
        raise NotImplementedError(f"epiloq.packed_fp4_mm: {kernel}, which batch invariance needs")
    dense = dequantised_explanation(dtype)
    return dense if experts is None else f"one expert after the other: {dense}"


def _explain_grouped_packed_mm(**call: Any) -> str:
    """The kernel for all experts, or that of one expert that has all rows. `dtype` is that of x, 8 bits with
    ``scale_a``; scales have the type that is multiplied."""
    call = {"experts": 1, "format": "int", "dtype": "bfloat16", **call}
    is_fp4, is_8_bits = call["format"] != "int", call["dtype"] in ("int8", "float8_e4m3fn")
    if is_fp4 and not is_8_bits:
        wanted = "int8 or float8_e4m3fn with FP4 (packed_fp4_mm multiplies floating-point rows)"
        refuse("grouped_packed_mm", "dtype", wanted, call["dtype"])
    multiplied = "bfloat16" if is_8_bits else call["dtype"]
    product = {**call, "dtype": multiplied}
    kernel = _core.explain_grouped_packed_mm_problem(**product)
    takes = is_fp4 if is_batch_invariant() else _prefers_one_kernel(product, by_float8=is_8_bits)
    if takes and not kernel.startswith("no kernel"):
        return f"activations as bfloat16: {kernel}" if is_8_bits else kernel
    rows = call["m"] * (call["experts"] if call.get("masked") else 1)
    sizes = {"m": rows, "n": call["n"], "k": call["k"]}
    sizes |= {name: call[name] for name in ("group_size", "arch", "sm_count") if name in call}
    if is_fp4 or call["dtype"] == "int8":
        return "one expert after the other, by w4a8_mm"
    if is_8_bits:
        return f"one expert after the other: {_explain_w4a8_mm(**sizes)}"
    bits = {"bits": call["bits"]} if "bits" in call else {}
    return f"one expert after the other: {_core.explain_weight_only_mm_problem(**sizes, **bits)}"


def _prefers_one_kernel(call: Mapping[str, Any], by_float8: bool = False) -> bool:
    problem = {name: value for name, value in call.items() if name != "sm_count"}
    return few_rows.prefers_one_kernel(by_float8=by_float8, **problem)


@dataclass(frozen=True)
class _Question:
    """How to explain an operation by sizes: the C++ function, its options besides ``m, n, k``, fixed arguments, and the
    largest K of int8, whether or not there are zero points."""

    ask: Callable[..., str]
    options: tuple[str, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    most_k: int = 2**31 - 1


_MM = ("dtype", "aligned", "arch", "sm_count", "terms")
# What int32 holds (src/api/scaled_mm.cpp).
_MOST_K, _MOST_K_AZP = 131071, 65793
_GROUPWISE = ("column_scales", "whole_row_scales", "per_row_scales", *_MM)
_EXPERTS = ("dtype", "arch", "sm_count")
_QUESTIONS = {
    "scaled_mm": _Question(_core.explain_scaled_mm_problem, ("fast_accum", *_MM), most_k=_MOST_K),
    "scaled_mm_azp": _Question(_core.explain_scaled_mm_problem, _MM, most_k=_MOST_K_AZP),
    "scaled_bmm": _Question(_core.explain_scaled_mm_problem, ("batches", "int8_out", *_MM), most_k=_MOST_K),
    "groupwise_mm": _Question(_core.explain_groupwise_mm_problem, _GROUPWISE, {"dtype": torch.float8_e4m3fn}),
    "grouped_mm": _Question(
        _core.explain_groupwise_mm_problem,
        ("experts", *_GROUPWISE),
        {"dtype": torch.float8_e4m3fn, "has_experts": True},
        most_k=_MOST_K,
    ),
    "online_quant_mm": _Question(
        _core.explain_online_quant_mm_problem, ("bits", "group_size", "arch", "sm_count", "memory_gb_s", "terms")
    ),
    "weight_only_mm": _Question(
        _core.explain_weight_only_mm_problem, ("bits", "group_size", "arch", "sm_count", "memory_gb_s", "terms")
    ),
    "grouped_packed_mm": _Question(
        _explain_grouped_packed_mm, ("experts", "masked", "format", "bits", "group_size", *_EXPERTS)
    ),
    "packed_fp4_mm": _Question(_explain_packed_fp4_mm, ("experts", "masked", "format", *_EXPERTS)),
    "w4a8_mm": _Question(_explain_w4a8_mm, ("group_size", "arch", "sm_count", "terms")),
}


def explain_problem(operation: str, sizes: Mapping[str, Any]) -> str:
    """The kernel for a problem given as ``m, n, k`` and options. Raises TypeError or ValueError, naming the option."""
    question = _QUESTIONS.get(operation)
    if question is None:
        raise TypeError(f"epiloq.{operation}: expected its own arguments; it cannot be explained by sizes alone")
    unknown = [name for name in sizes if name not in (*_SIZES, *question.options)]
    missing = [name for name in _SIZES if name not in sizes]
    if unknown or missing:
        wrong = f"{unknown[0]}, which is not one of them" if unknown else f"no {missing[0]}"
        options = ", ".join(question.options)
        raise TypeError(f"epiloq.{operation}: expected {', '.join(_SIZES)} and optionally {options}, got {wrong}")
    for name in _SIZES:
        if type(sizes[name]) is not int or not 0 <= sizes[name] < 2**31:
            raise ValueError(f"epiloq.{operation}: {name}: expected an integer from 0 to 2^31 - 1, got {sizes[name]!r}")
    call = {**question.given, **sizes}
    if "dtype" in call:
        call["dtype"] = str(call["dtype"]).removeprefix("torch.")
    if call.get("dtype", "int8") == "int8" and sizes["k"] > question.most_k:
        raise ValueError(f"epiloq.{operation}: k: expected at most {question.most_k} of int8, got {sizes['k']}")
    is_empty = 0 in (sizes["m"], sizes["n"])
    if is_empty:  # the options are checked all the same
        call |= {"m": 1, "n": PANEL_ROWS}
    try:
        answer = question.ask(**call)
    except TypeError:
        small = {name: call[name] for name in question.given} | _SMALL
        wrong = next(name for name in sizes if not _is_accepted(question, {**small, name: call[name]}))
        message = f"epiloq.{operation}: {wrong}: not of the type that this option has: {sizes[wrong]!r}"
        raise TypeError(message) from None
    return "nothing to launch: the output is empty" if is_empty else answer


_SMALL = dict.fromkeys(_SIZES, 1)


def _is_accepted(question: _Question, call: Mapping[str, Any]) -> bool:
    try:
        question.ask(**call)
    except TypeError:
        return False
    except Exception:
        return True
    return True
