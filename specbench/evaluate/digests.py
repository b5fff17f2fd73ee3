"""Digests of the images in a folder by the content of their files, so that an image is decoded only to be scored."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from specbench.storage.files import sha256_file, write_atomically
from specbench.storage.image_files import ImageFiles


class StoredDigests:
    """What `ImageFiles` remembers, in a file: SHA-256 of a file's bytes -> [digest, height, width, contrast].

    contents: that SHA-256 of each image; None where it cannot be read, which is reported when it is scored.
    """

    def __init__(self, path: Path, files: ImageFiles) -> None:
        """Fills in what an earlier scoring of files with this content found."""
        self._path, self._files = path, files
        self.contents = [_content(one) for one in files.paths]
        known: Any = None
        with suppress(OSError, ValueError, RecursionError):  # absent or damaged: the images are read again
            known = json.loads(path.read_text(encoding="utf-8"))
        for i, content in enumerate(self.contents):
            match known.get(content) if isinstance(known, dict) else None:
                case [str(digest), int(height), int(width), int(contrast)]:
                    files.digests[i], files.sizes[i], files.contrasts[i] = digest, (height, width), contrast

    def write(self) -> None:
        """Writes those of these images alone, so that the file does not grow beyond the folder."""
        files = self._files
        rows = zip(self.contents, files.digests, files.sizes, files.contrasts, strict=True)
        found = {content: [digest, *size, most] for content, digest, size, most in rows if content and digest and size}
        write_atomically(self._path, json.dumps(found).encode())


def _content(path: Path) -> str | None:
    with suppress(OSError):
        if path.is_file():  # opening a pipe would block
            return sha256_file(path)
    return None
