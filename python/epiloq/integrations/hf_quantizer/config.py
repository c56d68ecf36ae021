"""EpiloqConfig: the ``quantization_config`` of a model in transformers that runs on epiloq's layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from epiloq.formats.epiloq_modules import METHOD


class EpiloqConfig(QuantizationConfigMixin):
    """How to quantise a model in floating point, or what a quantised directory says of itself.

    scheme
        One of ``epiloq.schemes.available()`` that needs no calibration: what to make of the linear layers after
        loading. None opens directories that are quantised already, whatever `scheme` says.
    head, embedding
        Schemes for the output head and the input embedding, as `epiloq.quantize_` has them; None leaves them in
        floating point, and `scheme` None the other layers.
    modules_to_not_convert
        Names of linear layers, or of modules that hold them, to leave in floating point, or patterns of such names, as
        ``ignore`` of `epiloq.quantize_` has them.

    What else a config.json has under ``quantization_config`` is kept as it is, and saved again.
    """

    def __init__(
        self,
        scheme: str | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        quant_method: str = METHOD,
        *,
        head: str | None = None,
        embedding: str | None = None,
        **said: Any,
    ) -> None:
        self.quant_method: Any = quant_method
        self.scheme, self.head, self.embedding = scheme, head, embedding
        self.modules_to_not_convert = modules_to_not_convert
        self.said = said

    def to_dict(self) -> dict[str, Any]:
        """The JSON-ready dictionary, as config.json has it."""
        own: dict[str, Any] = {"scheme": self.scheme, "head": self.head, "embedding": self.embedding}
        own |= {"modules_to_not_convert": self.modules_to_not_convert}
        given = {name: value for name, value in own.items() if value is not None}
        method = {} if self.said.get("format") == METHOD else {"quant_method": self.quant_method}
        return copy.deepcopy({**method, **given, **self.said})
