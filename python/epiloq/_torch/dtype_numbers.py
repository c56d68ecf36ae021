"""Data types as arguments of operators: numbers where AOTInductor would confuse them.

Packages of AOTInductor hold a data type as the number that files of `torch.export` use. Before torch 2.12 it is read as
C++'s number, which differs: float32 becomes float64. Schemas there have integers instead. torch accepts a data type
for an integer, and passes C++'s number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

NEEDED = TorchVersion(torch.__version__) < "2.12"

# c10/core/ScalarType.h, whose numbers are part of C++'s binary interface.
DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    8: torch.complex32,
    9: torch.complex64,
    10: torch.complex128,
    11: torch.bool,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    25: torch.float8_e5m2fnuz,
    26: torch.float8_e4m3fnuz,
}

_DTYPE, _NUMBER = "ScalarType ", "int "


def with_numbers(schema: str, *functions: Callable[..., Any]) -> tuple[str, list[Callable[..., Any]]]:
    """A schema whose data types are integers, and the functions behind it, which are passed data types as before."""
    arguments = schema.partition("(")[2].partition(") ->")[0].split(", ")
    given = {at: argument.removeprefix(_DTYPE) for at, argument in enumerate(arguments) if argument.startswith(_DTYPE)}
    if not given:
        return schema, list(functions)
    return schema.replace(_DTYPE, _NUMBER), [_passed_dtypes(function, given) for function in functions]


def _passed_dtypes(function: Callable[..., Any], given: dict[int, str]) -> Callable[..., Any]:
    names = frozenset(given.values())

    def passed(*args: Any, **kwargs: Any) -> Any:
        by_place = (DTYPES[value] if at in given else value for at, value in enumerate(args))
        return function(*by_place, **{name: DTYPES[v] if name in names else v for name, v in kwargs.items()})

    return passed
