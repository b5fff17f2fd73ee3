"""Servers on the loopback, in a thread of the test; one has OpenAI's images interface, vLLM-Omni's additions to it, and
SGLang's `/generate` of GLM-Image's AR stage. It can fail on request."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import numpy as np
from PIL import Image

SIDE = 64


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


def noise(*key: object) -> np.random.Generator:
    """A generator that depends only on a key."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8]))


def png(fields: dict[str, Any]) -> bytes:
    """An image that depends only on the prompt and the seed."""
    pixels = noise(fields["prompt"], fields.get("seed")).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def answer(fields: dict[str, Any]) -> dict[str, Any]:
    return {"created": 0, "data": [{"b64_json": base64.b64encode(png(fields)).decode(), "url": None}]}


def omni_answer(fields: dict[str, Any], **metrics: Any) -> dict[str, Any]:
    """The answer of vLLM-Omni, with its metrics of the two stages of GLM-Image, or with other ones."""
    stages = {
        "0": {"stage_gen_time_ms": 30.0, "num_tokens_in": 20, "num_tokens_out": 1281},
        "1": {"stage_gen_time_ms": 10.0, "num_tokens_in": 0, "num_tokens_out": 0},
    }
    durations = {"queue_wait_ms": 0.1, "stage_0_gen_ms": 30.0, "stage_1_gen_ms": 10.0}
    measured = {"stage_metrics": stages, "stage_durations": durations, "peak_memory_mb": None} | metrics
    return answer(fields) | {"size": fields["size"], "metrics": measured}


def ar_answer(fields: dict[str, Any], ids: list[int] | None = None, **meta: Any) -> dict[str, Any]:
    """The answer of GLM-Image's AR server: codes of the preview, of the image, and the end; or other ids."""
    sampling = fields["sampling_params"]
    count = sampling["max_new_tokens"] - 1
    drawn = noise(fields["input_ids"], sampling.get("sampling_seed")).integers(0, 16384, count).tolist()
    ids = [*drawn, 16385] if ids is None else ids
    usage = {"prompt_tokens": len(fields["input_ids"]), "completion_tokens": len(ids), "cached_tokens": 0}
    return {"output_ids": ids, "meta_info": usage | {"e2e_latency": 0.5} | meta}


class StubServer(LoopbackServer):
    """answers: path -> the answer to the fields of a request there. trouble: what happens to a request instead of its
    answer: (handler, fields, number of this request among its prompt's, from 1) -> whether it was answered.
    seen: the fields of every request, in the order of arrival."""

    trouble: Callable[[Handler, dict[str, Any], int], bool] = staticmethod(lambda *_: False)  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(Handler)
        self.answers = {"/v1/images/generations": answer, "/generate": ar_answer}
        self.seen: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.versions: dict[str, Any] = {
            "/version": {"version": "0.16.0"},
            "/v1/models": {"data": [{"id": "GLM-Image", "owned_by": "vllm"}]},
        }
        self.under_way = self.most = 0  # requests at a time
        self.lock = threading.Lock()

    def prompts(self) -> list[Any]:
        """The prompt of every request, or its ids."""
        return [fields.get("prompt", fields.get("input_ids")) for fields in self.seen]


class Handler(Answers):
    server: StubServer

    def do_GET(self) -> None:
        self.server.headers.append(self.headers)
        if self.path in self.server.versions:
            self.send(self.server.versions[self.path])
        elif self.path.startswith("/v1/images/"):  # of an answer with a relative address
            self.send(png(json.loads(base64.urlsafe_b64decode(self.path.rsplit("/", 1)[1]))))
        else:
            self.send({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        server = self.server
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append(fields)
            server.headers.append(self.headers)
            number = server.prompts().count(server.prompts()[-1])
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        try:
            if not server.trouble(self, fields, number):
                self.send(server.answers[self.path](fields))
        finally:
            with server.lock:
                server.under_way -= 1

    def reset(self) -> bool:
        """Closes the connection without an answer."""
        self.close_connection = True
        self.connection.close()
        return True

    def drip(self, seconds: float) -> bool:
        """Sends a byte now and then, without end from the client's view."""
        self.send_response(200)
        self.end_headers()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.02)
        return True
