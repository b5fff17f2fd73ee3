"""Lines of JSON with a checksum of their own, as the journals of a run hold them, one object each.

A kill can leave a half-written last line, which readers drop; any other line that is not whole was changed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any


def encode(values: Mapping[str, Any]) -> bytes:
    """The line of an object, newline included. ValueError for a number that JSON lacks."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    return f'{text[:-1]}, "check": "{_check(text)}"}}\n'.encode()


def decode(line: bytes) -> dict[str, Any]:
    """The object of a line. ValueError or RecursionError where it is none, or its checksum differs."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("it is not an object")
    if values.pop("check", None) != _check(json.dumps(values, ensure_ascii=False)):
        raise ValueError("the checksum differs")
    return values


def split(text: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """(line number, line, whether a newline ends it) for every line that is not empty."""
    lines = text.split(b"\n")
    for i, line in enumerate(lines):
        if line:
            yield i + 1, line, i + 1 < len(lines)


def _check(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
