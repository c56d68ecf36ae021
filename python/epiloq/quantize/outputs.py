"""Formats that can represent a model quantised by a scheme."""

from __future__ import annotations

import torch

from epiloq.formats.layouts.base import FormatError
from epiloq.formats.table import FORMATS
from epiloq.quantize.targets import TARGETS
from epiloq.schemes import SCHEMES, Scheme, available

# A layer with sizes that every format supports.
CONVENIENT = 256


def schemes() -> dict[str, Scheme]:
    """Every scheme of ``epiloq quantize``: those of `quantize_` for linear layers."""
    return {name: SCHEMES[name] for name in available()}


def refusals(scheme: str, symmetric: bool = False) -> dict[str, str | None]:
    """Return, for each format in order of preference, why it cannot represent a scheme's layers; None if it can."""
    target = TARGETS[scheme]
    quantization = target.quantization(symmetric)
    weight = target.blank((CONVENIENT, CONVENIENT), symmetric)

    def reason(name: str) -> str | None:
        try:
            FORMATS[name].to_tensors(weight, quantization, torch.float16)
        except ValueError as error:
            return str(error)
        return None

    return {name: reason(name) for name in FORMATS}


def choose(scheme: str, layout: str | None, symmetric: bool = False) -> str:
    """The format to write: the one that was asked for or, by default, the first that can represent the scheme.

    Raises FormatError, with the reason and the formats that fit, for one that cannot.
    """
    found = refusals(scheme, symmetric)
    fitting = [name for name, reason in found.items() if reason is None]
    chosen = fitting[0] if layout is None else layout
    if found[chosen] is not None:
        raise FormatError(f"{found[chosen]}. The scheme {scheme} can be written as {', '.join(fitting)}")
    return chosen
