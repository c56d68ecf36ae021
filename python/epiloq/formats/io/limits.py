"""Limits of the size of a model that config.json describes, given the tensors in the files.

Wrong sizes in config.json could cause gigabytes to be allocated. So a model is first built on the meta device, where
tensors take no memory. Building stops as soon as it registers far more modules or parameters than the files have
tensors, and the result is compared with the files' size before anything is allocated.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

from epiloq.formats.layouts.base import FormatError

# A fused tensor may become several parameters, and there are modules without parameters.
_REGISTRATIONS_PER_TENSOR, _REGISTRATIONS = 16, 4096
# 2-bit weights have four values per byte; some GGUF kinds have less than 2 bits.
_VALUES_PER_BYTE, _VALUES = 8, 1 << 20
# Tables of positions and masks are not in the files.
_BUFFER_BYTES, _BUFFERS_PER_BYTE = 1 << 28, 16
# Sizes from which configurations build lists, dictionaries or loops before there is a module to count.
_COUNT = re.compile(r"layers?$|blocks?$|depth|labels$|experts?$|groups$|heads$|repeats$|stages$|codebooks$")
_LARGEST_COUNT = 1 << 16


@dataclass(frozen=True)
class Limits:
    """Number of tensors and bytes in the files; `where` names config.json in messages."""

    where: str
    tensors: int
    nbytes: int

    def check_config(self, config: Mapping[str, Any], prefix: str = "") -> None:
        """Raise FormatError if the number of layers, experts, labels etc. far exceeds the number of tensors."""
        most = max(_LARGEST_COUNT, self.tensors)
        for key, value in config.items():
            if isinstance(value, dict):
                self.check_config(value, f"{prefix}{key}.")
            elif type(value) is int and value > most and _COUNT.search(str(key)):
                raise FormatError(
                    f"{self.where}: {prefix}{key}: expected at most {most:,} for files of {self.tensors:,} tensors, "
                    f"got {value:,}"
                )

    @contextmanager
    def while_building(self) -> Iterator[None]:
        """Raise FormatError as soon as a model that this thread builds has far more parts than the files' tensors."""
        most = self.tensors * _REGISTRATIONS_PER_TENSOR + _REGISTRATIONS
        thread, count = threading.get_ident(), 0

        def registered(*_: Any) -> None:
            nonlocal count
            count += threading.get_ident() == thread
            if count > most:
                raise FormatError(
                    f"{self.where}: describes a model of more than {most:,} modules and parameters, "
                    f"but the files hold {self.tensors:,} tensors"
                )

        with (
            hooks.register_module_parameter_registration_hook(registered),
            hooks.register_module_module_registration_hook(registered),
        ):
            yield

    def check_size(self, model: nn.Module) -> None:
        """Raise FormatError for a model (also on the meta device) with more values than the files can contain."""
        values = sum(parameter.numel() for parameter in model.parameters())
        tables = sum(buffer.nbytes for buffer in model.buffers())
        if values > self.nbytes * _VALUES_PER_BYTE + _VALUES:
            raise FormatError(
                f"{self.where}: describes a model of {values:,} values, but the files contain {self.nbytes:,} bytes"
            )
        if tables > self.nbytes * _BUFFERS_PER_BYTE + _BUFFER_BYTES:
            raise FormatError(
                f"{self.where}: describes a model with {tables:,} bytes of tables, but the files contain "
                f"{self.nbytes:,} bytes"
            )
