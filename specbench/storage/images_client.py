"""A client of an image server: one request, its answer, and the meaning of a failure.

The kind of server (`models.servers`) determines the content of a request and how an answer is read.

Answers are not trusted. Each one becomes a JSON object, an image or a `RequestError`, within the timeout (including
connection, headers, body and redirections), and reads at most `LARGEST` bytes.
"""

from __future__ import annotations

import base64
import binascii
import email.utils
import http.client
import io
import json
import os
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from specbench.errors import UsageError, plain
from specbench.storage import image_files
from specbench.storage.deadline import within
from specbench.storage.package import __version__

#: Environment variable with the key of a server that requires one. It is sent only to the server's own address.
KEY = "SPECBENCH_API_KEY"
LARGEST = 2**28  # maximum bytes of an answer: the pixels of the largest image, uncompressed, in base64
MOST_VALUES = 10_000  # maximum values in an answer's JSON; small ones need 20 times the memory of their text
_SMALL = 2**20  # maximum bytes of an answer without an image
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # status codes after which another attempt may succeed
_QUICK = 20.0  # maximum seconds for the server's version and model names


class RequestError(Exception):
    """A request without an image. again: whether another attempt may succeed; wait: the seconds that the server wants
    the client to wait before it."""

    def __init__(self, reason: str, again: bool = True, wait: float | None = None) -> None:
        super().__init__(plain(" ".join(reason.split()))[:300])
        self.again, self.wait = again, wait


@dataclass(frozen=True)
class Answer:
    """The JSON object in a server's answer. read: returns the bytes at an address in it, within the time of the
    request; raises RequestError."""

    content: Mapping[str, Any]
    read: Callable[[str], bytes]


@dataclass(frozen=True)
class Reply:
    """The content of an answer. pixels: (H, W, 3) uint8, the image or, from a server without images, the map of its
    codes (`image_files.code_map`); codes: (rows, columns) of the image; tokens: the number that the server decoded for
    it, including a preview; ar_s: seconds of the stages that decode tokens, as the server reports them. None: the
    server does not report it."""

    pixels: np.ndarray
    codes: np.ndarray | None = None
    tokens: int | None = None
    ar_s: float | None = None


class ServerKind(Protocol):
    """The content of a request for one image, and how its answer is read."""

    path: str
    has_images: bool  # False: the answers contain codes that nothing here decodes

    def __init__(self, cfg: Mapping[str, Any]) -> None: ...

    @classmethod
    def check(cls, cfg: Mapping[str, Any]) -> None:
        """Raises UsageError for parameters that conflict. Opens no file and no connection."""

    def fields(self, prompt: str, seed: int) -> dict[str, Any]:
        """The fields of a request; fields with the value None are not sent."""

    def read(self, answer: Answer) -> Reply:
        """The reply in an answer. Raises RequestError for an answer that does not match the request."""


class ImagesClient:
    """A server. url: its address, with or without /v1; timeout: seconds until a request must be complete."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        self._key = os.environ.get(KEY, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):  # the error of the request would print the key
            raise UsageError(f"{KEY} must be one line of ASCII characters: set it to the server's key only")
        try:
            address = urllib.parse.urlsplit(self.url)
            self._host, _ = address.netloc, address.port
        except ValueError as e:
            raise UsageError(f"url={url} is not an address ({e}); correct it") from None
        self._tls = ssl.create_default_context()

    def post(self, path: str, fields: Mapping[str, Any]) -> Answer:
        """The answer to one request at a path; `fields` with the value None are not sent. Raises RequestError."""
        body = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
        deadline = time.monotonic() + self.timeout
        content = _parsed(self._read(path, deadline, LARGEST, body))
        return Answer(content, lambda url: self._read(url, deadline, LARGEST))

    def identity(self) -> tuple[str, list[str]]:
        """The server's name and version as far as it reports them ("vllm 0.16.0", "sglang", ""), and the names of its
        models. RequestError if there is no answer at all."""
        deadline = time.monotonic() + min(self.timeout, _QUICK)
        models = self._object("/v1/models", deadline)
        listed = models.get("data") if models else None
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        owner = next((entry["owned_by"] for entry in entries if isinstance(entry.get("owned_by"), str)), "")
        version = ""
        for path in ("/version", "/server_info", "/get_server_info"):  # of vLLM; of SGLang, newer and older
            about = self._object(path, deadline)
            if about and isinstance(about.get("version"), str):
                version = about["version"]
                break
        names = [plain(entry["id"])[:200] for entry in entries if isinstance(entry.get("id"), str)]
        return plain(" ".join(filter(None, [owner, version])))[:100], names

    def _object(self, path: str, deadline: float) -> dict[str, Any] | None:
        """The JSON object at a path; None if the server has none there. RequestError if there is no answer."""
        try:
            return _parsed(self._read(path, deadline, _SMALL))
        except RequestError as e:
            if isinstance(e.__cause__, OSError) and not isinstance(e.__cause__, urllib.error.HTTPError):
                raise
            return None

    def _read(self, path: str, deadline: float, largest: int, body: bytes | None = None) -> bytes:
        """The bytes at a path of the server, or at another address. Raises RequestError."""
        sockets: list[socket.socket] = []
        try:
            return within(_left(deadline), lambda: self._fetched(path, deadline, largest, body, sockets))
        except urllib.error.HTTPError as e:
            raise _refused(e) from e
        except http.client.InvalidURL as e:
            raise RequestError(f"the address is not valid ({e})", again=False) from e
        except http.client.HTTPException as e:
            raise RequestError(f"no complete answer ({type(e).__name__})") from e
        except (OSError, ValueError) as e:  # unreachable, reset, too late, or not an address
            reason = e.reason if isinstance(e, urllib.error.URLError) else e
            late = isinstance(e, TimeoutError) or isinstance(reason, TimeoutError)
            kind = "" if isinstance(reason, str) else f"{type(reason).__name__}: "
            text = f"no answer within {self.timeout:g} s" if late else f"{kind}{reason}"
            raise RequestError(text, again=isinstance(e, OSError)) from e
        finally:
            for sock in sockets:
                with suppress(OSError):  # ends a thread that still reads (TLS's own method would wait for the server)
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _fetched(
        self, path: str, deadline: float, largest: int, body: bytes | None, sockets: list[socket.socket]
    ) -> bytes:
        """The work of `_read`. Appends each socket of an answer to `sockets`."""
        url = path if "://" in path else f"{self.url}/{path.lstrip('/')}"
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise RequestError(f"the image's address is neither http nor https ({url[:100]})", again=False)
        headers = {"User-Agent": f"specbench/{__version__}", "Accept": "*/*"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(url, body, headers)  # noqa: S310
        if self._key and urllib.parse.urlsplit(url).netloc == self._host:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            _Collector(sockets, deadline, self._tls),
            urllib.request.HTTPRedirectHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.UnknownHandler(),  # a redirection to a file, or by ftp
        ):
            opener.add_handler(handler)
        try:
            with opener.open(request, timeout=_left(deadline)) as answer:
                return _body(answer, deadline, largest)
        except urllib.error.HTTPError as e:
            with e:
                e.msg = _explanation(e, min(deadline, time.monotonic() + 5))
                raise


class _Collector(urllib.request.AbstractHTTPHandler):
    """Opens http and https, and collects the sockets of all answers, so that another thread can end the reading."""

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def __init__(self, sockets: list[socket.socket], deadline: float, tls: ssl.SSLContext) -> None:
        super().__init__()
        self._sockets, self._deadline, self._tls = sockets, deadline, tls

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPSConnection, context=self._tls), request)

    def _connection(self, kind: Any, *arguments: Any, **options: Any) -> http.client.HTTPConnection:
        made: http.client.HTTPConnection = kind(*arguments, **options)
        made.response_class = self._response  # type: ignore[assignment]
        return made

    def _response(self, sock: socket.socket, *arguments: Any, **options: Any) -> http.client.HTTPResponse:
        _left(self._deadline)  # after the deadline, nobody waits for this connection
        self._sockets.append(sock)
        return http.client.HTTPResponse(sock, *arguments, **options)


def image_of(answer: Answer) -> np.ndarray:
    """The image (H, W, 3) uint8 in an answer of OpenAI's images API: {"data": [{"b64_json": ...} or {"url": ...}]},
    where the address may be relative to the server. Raises RequestError."""
    data = answer.content.get("data")
    first = data[0] if isinstance(data, list) and data else None
    if not isinstance(data, list) or not isinstance(first, dict):
        raise RequestError("the answer contains no image")
    if len(data) > 1:
        raise RequestError(f"the answer contains {len(data)} images instead of 1", again=False)
    if isinstance(first.get("b64_json"), str):
        try:
            content = base64.b64decode(first["b64_json"].partition("base64,")[2] or first["b64_json"], validate=True)
        except (binascii.Error, ValueError):
            raise RequestError("the answer's b64_json is not base64") from None
    elif isinstance(first.get("url"), str):
        content = answer.read(first["url"])
    else:
        raise RequestError("the answer has neither b64_json nor url")
    try:
        return image_files.read_bytes(content, "the answer")
    except UsageError as e:
        raise RequestError(str(e)) from None


def _left(deadline: float) -> float:
    """Seconds until a deadline. Raises TimeoutError after it."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _body(answer: Any, deadline: float, largest: int) -> bytes:
    """An answer's bytes, read in pieces up to a deadline and a size."""
    if (coding := answer.headers.get("Content-Encoding", "identity")).lower() != "identity":
        raise RequestError(f"the answer is compressed ({coding}), but the request forbids that", again=False)
    content = io.BytesIO()
    while piece := answer.read1(1 << 16):
        content.write(piece)
        _left(deadline)
        if content.tell() > largest:
            raise RequestError(f"the answer is larger than {largest >> 20} MiB", again=False)
    wanted = answer.headers.get("Content-Length")
    if wanted and wanted.isdecimal() and content.tell() < int(wanted):
        raise RequestError(f"the answer ends after {content.tell()} of {wanted} bytes")
    return content.getvalue()


def _parsed(content: bytes) -> dict[str, Any]:
    if sum(content.count(sign) for sign in b",[{") > MOST_VALUES:
        raise RequestError(f"the answer contains more than {MOST_VALUES} values", again=False)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError("the answer is not a JSON object")
    return value


def _explanation(error: urllib.error.HTTPError, deadline: float) -> str:
    """A server's own message with a status code: {"error": {"message": ...}} or {"detail": ...}; "" without one."""
    try:
        about = _parsed(_body(error, deadline, _SMALL))
    except (OSError, ValueError, RequestError, http.client.HTTPException):
        return ""
    detail = about.get("error") or about.get("detail") or about.get("message") or ""
    return str(detail.get("message", detail) if isinstance(detail, dict) else detail)[:1000]


def _refused(error: urllib.error.HTTPError) -> RequestError:
    """The error for a status code; `error.msg` contains the explanation."""
    reason = f"HTTP {error.code}{f': {error.msg}' if error.msg else ''}"
    return RequestError(reason, error.code in _AGAIN, _retry_after(error.headers.get("Retry-After")))


def _retry_after(text: str | None) -> float | None:
    """Seconds in a Retry-After header, which is a number or a date."""
    if not text:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
