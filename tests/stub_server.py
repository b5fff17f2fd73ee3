"""Servers on the loopback, in a thread of the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


class LoopbackServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that went away


S = TypeVar("S", bound=LoopbackServer)


@contextmanager
def running(server: S) -> Iterator[S]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Answers(BaseHTTPRequestHandler):
    """Keeps no log and sends whole answers."""

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, content: bytes | dict[str, Any], code: int = 200, cut: int = 0, **headers: str) -> bool:
        """Sends an answer, without its last `cut` bytes."""
        content = json.dumps(content).encode() if isinstance(content, dict) else content
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) - cut])
        return True
