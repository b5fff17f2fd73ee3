"""Transfers one file from an address with huggingface_hub, which continues partial files and tries again. No file grows
beyond its size, whatever a server sends."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench.errors import UsageError
from specbench.storage.files import format_size, size

TIMEOUT = 10.0  # seconds without a byte of an answer


def check_online(source: str, otherwise: str) -> None:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise UsageError(f"HF_HUB_OFFLINE forbids requests for {source}: unset it, or {otherwise}")


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def size_at(address: str) -> int:
    """The bytes of a file that the server at an address reports. UsageError if it does not answer or reports none."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    check_online(address, "fetch it with a browser")
    try:
        answer = get_session().head(address, headers=_PLAIN, timeout=TIMEOUT)
        answer.raise_for_status()
        return int(answer.headers["Content-Length"])
    except Exception as e:  # the client's exceptions differ from version to version
        raise UsageError(f"cannot get the size of {address} ({first_line(e)}): try again") from e


#: A range and the length of a compressed answer do not fit the file.
_PLAIN = {"Accept-Encoding": "identity"}


def download(address: str, path: Path, count: int) -> Path:
    """Download a file of `count` bytes to `path`, through `path`.part, which a later call continues.

    UsageError if the server does not answer or has another file.
    """
    if size(path) == count:  # put there by the user, as the error advises
        return path
    check_online(address, f"put it at {path}")
    try:
        return transfer(address, path, count, {})
    except UsageError:
        raise
    except Exception as e:  # the client's exceptions differ from version to version
        raise UsageError(
            f"cannot fetch {address} ({first_line(e)}); {format_size(size(_partial(path)) or 0)} of"
            f" {format_size(count)} are downloaded: run the same command again, or put it at {path}"
        ) from e


class _Bounded(io.BufferedWriter):
    """A file for appending that does not grow beyond `limit` bytes: an endless or compressed answer would fill the disk
    before its size is checked. Raises OSError."""

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._limit, self.is_exceeded = limit, False

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > self._limit:
            self.is_exceeded = True
            raise OSError(f"more than {self._limit} bytes")
        return super().write(content)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def transfer(address: str, path: Path, count: int, headers: Mapping[str, str]) -> Path:
    """Download a file of `count` bytes to `path`, through `path`.part. UsageError if the server sends more; the
    client's exceptions for everything else."""
    from huggingface_hub.file_download import http_get

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    if (size(partial) or 0) > count:
        partial.unlink()
    with _Bounded(partial, count) as f:
        try:
            http_get(
                address,
                f,
                resume_size=f.tell(),
                headers={**headers, **_PLAIN},
                expected_size=count,
                displayed_filename=path.name,
            )
        except Exception as e:
            if f.is_exceeded:
                partial.unlink()
                raise UsageError(f"{address} has more than {count} bytes: it is not the published file any more") from e
            if getattr(getattr(e, "response", None), "status_code", None) == 416:
                partial.unlink()  # the server's file is shorter than the partial one
            raise
    os.replace(partial, path)
    return path
