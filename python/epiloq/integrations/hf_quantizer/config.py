"""EpiloqConfig: the ``quantization_config`` of a transformers model with epiloq's layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from epiloq.formats.epiloq_modules import METHOD

# These packages also quantise models while transformers loads them, by classes of their own with these names; a
# directory's description has a different name in memory, and the original one in config.json.
HELD_AS = {method: f"{method} by epiloq" for method in ("bitsandbytes", "torchao")}
_IN_FILES = {held: method for method, held in HELD_AS.items()}


class EpiloqConfig(QuantizationConfigMixin):
    """Scheme for quantising a floating-point model, or the description of a quantised directory.

    scheme
        One of ``epiloq.schemes.available()`` that needs no calibration, applied to the linear layers after loading.
        None opens directories that are already quantised; for these `scheme` has no effect.
    head, embedding
        Schemes for the output head and the input embedding, as in `epiloq.quantize_`; None leaves them in floating
        point, as a `scheme` of None does for the other layers.
    modules_to_not_convert
        Names of linear layers, or of modules that contain them, to leave in floating point, or patterns, as for
        ``ignore`` of `epiloq.quantize_`.

        Other entries under ``quantization_config`` in config.json are kept and saved again.
    """

    def __init__(
        self,
        scheme: str | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        quant_method: str = METHOD,
        *,
        head: str | None = None,
        embedding: str | None = None,
        **entries: Any,
    ) -> None:
        self.quant_method: Any = HELD_AS.get(quant_method, quant_method)
        self.scheme, self.head, self.embedding = scheme, head, embedding
        self.modules_to_not_convert = modules_to_not_convert
        self.entries = entries

    def to_dict(self) -> dict[str, Any]:
        """The JSON-ready dictionary for config.json."""
        own: dict[str, Any] = {"scheme": self.scheme, "head": self.head, "embedding": self.embedding}
        own |= {"modules_to_not_convert": self.modules_to_not_convert}
        given = {name: value for name, value in own.items() if value is not None}
        method = (
            {}
            if self.entries.get("format") == METHOD
            else {"quant_method": _IN_FILES.get(self.quant_method, self.quant_method)}
        )
        return copy.deepcopy({**method, **given, **self.entries})
