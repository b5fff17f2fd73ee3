"""Lines of JSON with a checksum of their own, as the journals of a run hold them, one object each.

A kill can leave a half-written last line, which readers drop; any other line that is not whole was changed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from specbench.errors import UsageError
from specbench.storage.files import append_line, content

T = TypeVar("T")  # a dataclass


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


class AppendOnly(Generic[T]):
    """The objects in the lines of a file, in their order, and the only way to add one. Nothing in it is replaced."""

    def __init__(self, path: Path, read: Callable[[bytes], T], kind: str) -> None:
        """Reads `path`. read: the object of a line; kind: of an object, such as "a score". UsageError for a line that
        no kill can explain."""
        self.path, self.lines = path, list[T]()
        text = content(path) if path.exists() else b""
        whole = text.rfind(b"\n") + 1  # a killed process may have begun another line
        self._cut = whole if whole < len(text) else None
        for number, line, _ in split(text[:whole]):
            try:
                self.lines.append(read(line))
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                raise UsageError(
                    f"line {number} of {path} is not {kind}, or was changed; remove that line and run again"
                ) from None

    def __iter__(self) -> Iterator[T]:
        return iter(self.lines)

    def add(self, item: T) -> None:
        """Appends a line; it is on disk when this returns."""
        if self._cut is not None:
            os.truncate(self.path, self._cut)
            self._cut = None
        append_line(self.path, encode(asdict(item)))  # type: ignore[call-overload]
        self.lines.append(item)
