"""How large a model that config.json describes may be, given the tensors that the files hold.

Sizes in config.json cost nothing to write and gigabytes to believe. A model is built on the meta device first, where
tensors take no memory; building stops when it registers far more modules or parameters than the files have tensors,
and what was built is compared with the bytes of the files before anything is allocated.
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

# A fused tensor of a file may become several parameters, and modules without parameters surround them.
_REGISTRATIONS_PER_TENSOR, _REGISTRATIONS = 16, 4096
# 2 bits are four values a byte; GGUF has kinds of block below 2 bits.
_VALUES_PER_BYTE, _VALUES = 8, 1 << 20
# Tables of positions and masks are in no file.
_BUFFER_BYTES, _BUFFERS_PER_BYTE = 1 << 28, 16
# What configurations make a list or a dictionary of, or a loop over, before there is a module to count.
_COUNT = re.compile(r"layers?$|blocks?$|depth|labels$|experts?$|groups$|heads$|repeats$|stages$|codebooks$")
_LARGEST_COUNT = 1 << 16


@dataclass(frozen=True)
class Limits:
    """What files hold: how many tensors of how many bytes; `where` names config.json in messages."""

    where: str
    tensors: int
    nbytes: int

    def check_config(self, config: Mapping[str, Any], prefix: str = "") -> None:
        """Raise FormatError for a number of layers, experts, labels .. far beyond the number of tensors."""
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

        handles = (
            hooks.register_module_parameter_registration_hook(registered),
            hooks.register_module_module_registration_hook(registered),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def check_size(self, model: nn.Module) -> None:
        """Raise FormatError for a model, perhaps on the meta device, of more values than the files' bytes can mean."""
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
