"""Random damage to the files of a model, as bytes by name, and nasty values to put into JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Files = dict[str, bytes]

NASTY: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 31, 33, 64, 127, 4096, 65537, 3_000_000, 8_000_000),
    *(2**31 - 1, 2**31, 2**40, 2**63, 2**80, -(2**40), 0.5, 1e-9, 1e30, float("nan"), float("inf")),
    *("", "abc", "silu", "4", "\0", "model", "x" * 3000, [], [4], [[1]], ["abc"], {}, {"a": 1}, {"0": [None]}),
)
_DTYPES = ("F32", "F16", "BF16", "F64", "I8", "U8", "I32", "I64", "F8_E4M3", "BOOL", "F4", "", None, 3)


def change_json(rng: Random, value: Any) -> Any:
    """A copy with a random entry replaced, removed, renamed or doubled."""
    found = json.loads(json.dumps(value))
    places = list(_places(found))
    if not places:
        return rng.choice(NASTY)
    holder, key = rng.choice(places)
    action = rng.randrange(6)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
    elif action == 2 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = rng.choice((holder[key] * 2, holder[key] + 1, holder[key] - 1, -holder[key], holder[key] // 2))
    else:
        holder[key] = rng.choice(NASTY)
    return found


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def change_bytes(rng: Random, data: bytes) -> bytes:
    """A few bytes flipped, removed or inserted, or a number replaced by another."""
    if not data:
        return b"\x00"
    # What decides lies at the beginning more often than not.
    at = rng.randrange(min(len(data), rng.choice((64, 4096, len(data)))))
    action = rng.randrange(6)
    if action == 0:
        return data[:at]
    if action == 1:
        return data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9))) + data[at:]
    if action == 2:
        return data[:at] + data[at + rng.randrange(1, 64) :]
    if action == 3:
        number = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1, rng.randrange(2**16)))
        return data[:at] + struct.pack("<Q", number) + data[at + 8 :]
    if action == 4:
        return data[:at] + data[at : at + rng.randrange(1, 64)] + data[at:]
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def change_header(rng: Random, data: bytes) -> bytes:
    """A safetensors file with another description of a tensor, the length of the header kept true."""
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    action = rng.randrange(8)
    if action == 0:
        del header[name]
    elif action == 1:
        header[rng.choice(names) if rng.randrange(2) else f"{name}x"] = header.pop(name)
    elif action == 2:
        header[name]["dtype"] = rng.choice(_DTYPES)
    elif action == 3:
        rng.shuffle(header[name]["shape"])
    elif action == 4:
        header[name]["shape"] = rng.choice(
            ([], [0], [2**62, 4], [-1, -1], [1], header[name]["shape"] + [1], "abc", None)
        )
    elif action == 5:
        header[name]["data_offsets"] = rng.choice(
            (
                [0, 0],
                [0, len(body)],
                [len(body), len(body)],
                [4, 2],
                [0],
                None,
                header[rng.choice(names)]["data_offsets"],
            )
        )
    elif action == 6:
        begin, end = header[name]["data_offsets"]
        fill = rng.choice((b"\x00", b"\xff", b"\x7f", b"\x80", b"\x7f\xc0", b"\x00\x7c"))
        body = body[:begin] + (fill * (end - begin))[: end - begin] + body[end:]
    else:
        header = change_json(rng, header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def change_directory(rng: Random, files: Files) -> Files:
    """One or two changes to the files of a model directory."""
    found = dict(files)
    for _ in range(rng.randrange(1, 3)):
        name = rng.choice(sorted(found) + ["config.json"] * 4)
        data, change = found[name], _CHANGES.get(name.rpartition(".")[2], change_bytes)
        roll = rng.randrange(12)
        if roll == 0:
            del found[name]
            found.setdefault("config.json", b"{}")
        elif roll == 1:
            found[name] = change_bytes(rng, data)
        else:
            try:
                found[name] = change(rng, data)
            except (ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError):  # Of damaged data.
                found[name] = change_bytes(rng, data)
    return found


def _text(rng: Random, data: bytes) -> bytes:
    return json.dumps(change_json(rng, json.loads(data))).encode()


_CHANGES: dict[str, Callable[[Random, bytes], bytes]] = {"json": _text, "safetensors": change_header}
