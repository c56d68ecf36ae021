"""Chooses which of an engine's linear layers and experts run on epiloq, by the user's choice and the GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

from epiloq import _core

VARIABLE = "EPILOQ_ENGINE_LAYERS"
_INTEGER, _GROUPED, _FLOAT8 = (75, 80, 90), (80, 90), (89, 90)
KERNELS: Mapping[str, tuple[int, ...]] = {
    "int8": _INTEGER,
    "fp8": _FLOAT8,
    "fp8-block": _FLOAT8,
    "w4a16": _INTEGER,
    "w8a16": _INTEGER,
    "w8a16-fp8": _INTEGER,
    "w4a16-fp4": _INTEGER,
    "w4a16-experts": _INTEGER,
    "w8a16-experts": _INTEGER,
    "fp8-block-experts": _FLOAT8,
    "fp8-experts": _FLOAT8,
    "int8-experts": _GROUPED,
    "mxfp4-experts": (90,),
    "nvfp4-experts": (90,),
}
"""Kinds of layers, with the architectures that have tensor-core kernels for them."""
_ON_HOPPER = ("w4a16-experts", "w8a16-experts", "int8-experts", "mxfp4-experts", "nvfp4-experts")
"""Kinds that epiloq runs by default on compute capability 9.0 alone, as they were compared on no other GPU."""
BY_DEFAULT = ("int8", "fp8", "fp8-block", "w4a16", "w8a16", "fp8-block-experts", "fp8-experts", *_ON_HOPPER)
"""The kinds that epiloq runs by default. Other linear layers dequantise the whole weight in each call with more than 64
tokens (FP4 on compute capability 9.0 does not), so the engine's own kernels may be faster for long prompts."""
_NEWEST = 90


def is_chosen() -> bool:
    """Whether the user chose layers, rather than the defaults."""
    return VARIABLE in os.environ


def chosen_layers() -> tuple[str, ...]:
    """The kinds of layers of other formats that epiloq may run: those in ``EPILOQ_ENGINE_LAYERS``, by default
    `BY_DEFAULT`. The variable contains kinds separated by commas, or "all" or "none" alone. Layers of epiloq's own
    format do not depend on it. Raises ValueError for other words.
    """
    value = os.environ.get(VARIABLE)
    if value is None:
        return BY_DEFAULT
    words = [word.strip() for word in value.split(",") if word.strip()]
    if words == ["all"]:
        return tuple(KERNELS)
    if words == ["none"] or not words:
        return ()
    if {"all", "none"} & {*words}:
        raise ValueError(f"epiloq: {VARIABLE}: expected all and none to stand alone, got {value!r}")
    unknown = [word for word in words if word not in KERNELS]
    if unknown:
        expected = f"all, none, or some of {', '.join(KERNELS)}"
        raise ValueError(f"epiloq: {VARIABLE}: expected {expected}, separated by commas, got {unknown[0]!r}")
    return tuple(kind for kind in KERNELS if kind in words)


def runs_on(kind: str, capability: int | None) -> tuple[bool, str | None]:
    """Whether this build has kernels for a kind of layer on a device, and the reason if not.

    `capability` is a CUDA device's compute capability, 90 for 9.0; None means a CPU, which runs every kind.
    """
    if kind not in chosen_layers():
        return False, f"{VARIABLE} leaves out {kind}"
    if kind in _ON_HOPPER and capability != _NEWEST and not is_chosen():
        return False, f"{kind} was compared on compute capability 9.0 alone; {VARIABLE}={kind} selects epiloq's"
    if capability is None:
        return True, None
    if capability // 10 > _NEWEST // 10:
        return False, f"epiloq has no kernels of its own for compute capability {capability / 10}"
    built = {int(name.removeprefix("sm")) for name in _core.built_archs()}
    # WGMMA exists on 9.0 only; other kernels also run on newer devices.
    usable = [arch for arch in KERNELS[kind] if arch in built and arch <= capability]
    if usable:
        return True, None
    wanted = ", ".join(f"sm{arch}" for arch in KERNELS[kind] if arch <= capability)
    if not wanted:
        return False, f"{kind} needs compute capability {KERNELS[kind][0] / 10} or newer, this is {capability / 10}"
    return False, f"this build of epiloq has no kernels for {wanted}"
