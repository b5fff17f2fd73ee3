"""The Hugging Face hub, GitHub's releases and COCO's server, on this machine: a folder served over their protocols."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from specbench.storage.files import sha256_file

#: Files of at least this many bytes are kept by Git LFS: the hub lists their SHA-256, and sends them from elsewhere.
LARGE = 1 << 20
COMMIT = "5" * 40  # of a branch
_CHUNK = 1 << 20


@dataclass
class Hub:
    """Files on the disk. repositories: name -> file -> path; plain: path of an address -> path."""

    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    plain: dict[str, Path] = field(default_factory=dict)
    digests: dict[Path, str] = field(default_factory=dict)
    root: str = ""

    def add(self, repository: str, folder: Path) -> None:
        """Add all files of a folder to a repository."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self.repositories[repository] = {path.relative_to(folder).as_posix(): path for path in paths}

    def sha256(self, path: Path) -> str:
        if path not in self.digests:
            self.digests[path] = sha256_file(path)
        return self.digests[path]

    @property
    def bytes(self) -> int:
        files = [*self.plain.values(), *(path for files in self.repositories.values() for path in files.values())]
        return sum(path.stat().st_size for path in files)

    def listing(self, repository: str, revision: str) -> dict[str, Any]:
        """What the hub answers about a revision."""
        siblings = []
        for name, path in self.repositories[repository].items():
            size = path.stat().st_size
            siblings.append({"rfilename": name, "size": size})
            if size >= LARGE:
                siblings[-1]["lfs"] = {"sha256": self.sha256(path), "size": size, "pointerSize": 130}
        return {"id": repository, "sha": commit(revision), "siblings": siblings}

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        """Serves on a free port of the loopback; `root` is the address."""

        class Handler(_Handler):
            hub = self

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.root = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def commit(revision: str) -> str:
    return revision if re.fullmatch(r"[0-9a-f]{40}", revision) else COMMIT


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path):
            if match[1] not in self.hub.repositories:
                self._refuse()
                return
            self._text(json.dumps(self.hub.listing(match[1], match[2])).encode(), "application/json")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            file = self.hub.repositories.get(match[1], {}).get(match[3])
            if file is None:
                self._refuse()
                return
            large = file.stat().st_size >= LARGE
            headers = {"X-Repo-Commit": commit(match[2]), "ETag": f'"{self.hub.sha256(file)}"'}
            if not large:
                self._file(file, headers)
                return
            headers |= {"X-Linked-Size": str(file.stat().st_size), "X-Linked-ETag": headers.pop("ETag")}
            elsewhere = self.hub.root.replace("127.0.0.1", "localhost")  # as the hub, from a server of another name
            self._send(302, headers | {"Location": f"{elsewhere}/lfs{file}", "Content-Length": "0"})
        elif path.startswith("/lfs/"):
            paths = {str(p): p for files in self.hub.repositories.values() for p in files.values()}
            file = paths.get(path.removeprefix("/lfs"))
            self._refuse() if file is None else self._file(file, {"ETag": f'"{self.hub.sha256(file)}"'})
        elif path in self.hub.plain:
            self._file(self.hub.plain[path], {})
        else:
            self._refuse()

    def _refuse(self) -> None:
        self._send(404, {"Content-Length": "0"})

    def _send(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _text(self, content: bytes, kind: str) -> None:
        self._send(200, {"Content-Type": kind, "Content-Length": str(len(content))})
        if self.command == "GET":
            self.wfile.write(content)

    def _file(self, path: Path, headers: Mapping[str, str]) -> None:
        """A file, or its end after `Range: bytes=N-`."""
        size = path.stat().st_size
        ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(ranged[1]) if ranged else 0
        last = min(int(ranged[2]), size - 1) if ranged and ranged[2] else size - 1
        if ranged and first >= size:
            self._send(416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
            return
        span = {"Content-Range": f"bytes {first}-{last}/{size}"} if ranged else {}
        count = last + 1 - first
        self._send(206 if ranged else 200, {**headers, **span, "Content-Length": str(count), "Accept-Ranges": "bytes"})
        if self.command != "GET":
            return
        with path.open("rb") as f:
            f.seek(first)
            while count:
                piece = f.read(min(_CHUNK, count))
                self.wfile.write(piece)
                count -= len(piece)
