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


ARGUMENTS = ("scheme", "modules_to_not_convert", "quant_method", "head", "embedding")


def unknown_argument(name: str) -> TypeError:
    """The error for an argument that `EpiloqConfig` does not have."""
    instead = "; layers are left in floating point by modules_to_not_convert" if name == "ignore" else ""
    return TypeError(f"EpiloqConfig: expected arguments among {', '.join(ARGUMENTS)}, got {name!r}{instead}")


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

    `from_dict` reads ``quantization_config`` of config.json, of which other entries are kept and saved again.

    Raises:
        TypeError: an unknown argument; the message names the known ones.
    """

    def __init__(
        self,
        scheme: str | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        quant_method: str = METHOD,
        *,
        head: str | None = None,
        embedding: str | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise unknown_argument(next(iter(unknown)))
        self.quant_method: Any = HELD_AS.get(quant_method, quant_method)
        self.scheme, self.head, self.embedding = scheme, head, embedding
        self.modules_to_not_convert = modules_to_not_convert
        self.entries: dict[str, Any] = {}
        """Entries of config.json other than the arguments."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The configuration with the entries of config.json, whatever they are; as of transformers' own classes."""
        own = {name: value for name, value in config_dict.items() if name in ARGUMENTS}
        found = super().from_dict(own, return_unused_kwargs, **kwargs)  # type: ignore[no-untyped-call]
        config = found[0] if return_unused_kwargs else found
        config.entries = {name: value for name, value in config_dict.items() if name not in ARGUMENTS}
        return found

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
