"""A client of OpenAI's images interface: one request, its answer, and what a failed one means.

The fields that vLLM-Omni and SGLang both read (their documentation and request classes, 2026-11): `prompt`, `model`,
`n`, `size` ("1024x1024"), `response_format` ("b64_json"; SGLang also "url"), `output_format` ("png"; SGLang's own
default is a JPEG), `seed`, `negative_prompt`, `guidance_scale`, `num_inference_steps`. The answer is {"data":
[{"b64_json": ...} or {"url": ...}]}, where the address may be relative to the server. The answers are not trusted.
"""

from __future__ import annotations

import base64
import binascii
import email.utils
import http.client
import io
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np

from specbench._version import __version__
from specbench.errors import UsageError, plain
from specbench.storage import image_files

#: Environment variable with the key of a server that asks for one. It is sent to the server's own address alone.
KEY = "SPECBENCH_API_KEY"
LARGEST = 2**28  # bytes of an answer
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # status codes after which another attempt may succeed
_QUICK = 20.0  # seconds that a server may take to name its version and its models


class RequestError(Exception):
    """A request without an image. again: whether another attempt may succeed; wait: seconds that the server asks to
    wait before it."""

    def __init__(self, reason: str, again: bool = True, wait: float | None = None) -> None:
        super().__init__(plain(" ".join(reason.split()))[:300])
        self.again, self.wait = again, wait


class ImagesClient:
    """A server. url: its address, with or without /v1; timeout: longest wait for an answer, in seconds."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        self._host = urllib.parse.urlsplit(self.url).netloc

    def generate(self, fields: Mapping[str, Any]) -> np.ndarray:
        """The image (H, W, 3) uint8 of one request; `fields` that are None are left out. Raises RequestError."""
        body = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
        deadline = time.monotonic() + self.timeout
        answer = _parsed(self._read("/v1/images/generations", deadline, body))
        data = answer.get("data")
        first = data[0] if isinstance(data, list) and data else None
        if not isinstance(first, dict):
            raise RequestError("the answer holds no image")
        if isinstance(first.get("b64_json"), str):
            try:
                content = base64.b64decode(
                    first["b64_json"].partition("base64,")[2] or first["b64_json"], validate=True
                )
            except (binascii.Error, ValueError):
                raise RequestError("the answer's b64_json is not base64") from None
        elif isinstance(first.get("url"), str):
            content = self._read(first["url"], deadline)
        else:
            raise RequestError("the answer has neither b64_json nor url")
        try:
            return image_files.read_bytes(content, "the answer")
        except UsageError as e:
            raise RequestError(str(e)) from None

    def identity(self) -> tuple[str, list[str]]:
        """The server's name and version as far as it tells them ("vllm 0.16.0", "sglang", ""), and the names of its
        models. RequestError where nothing answers at all."""
        models = self._told("/v1/models")
        entries = [one for one in models.get("data") or [] if isinstance(one, dict)] if models else []
        owner = next((str(one["owned_by"]) for one in entries if isinstance(one.get("owned_by"), str)), "")
        version = ""
        for path in ("/version", "/server_info", "/get_server_info"):  # of vLLM; of SGLang, newer and older
            told = self._told(path)
            if told and isinstance(told.get("version"), str):
                version = told["version"]
                break
        names = [plain(one["id"])[:200] for one in entries if isinstance(one.get("id"), str)]
        return plain(" ".join(filter(None, [owner, version])))[:100], names

    def _told(self, path: str) -> dict[str, Any] | None:
        """The JSON object at a path; None where the server has none there. RequestError where nothing answers."""
        try:
            return _parsed(self._read(path, time.monotonic() + min(self.timeout, _QUICK)))
        except RequestError as e:
            if isinstance(e.__cause__, OSError) and not isinstance(e.__cause__, urllib.error.HTTPError):
                raise
            return None

    def _read(self, path: str, deadline: float, body: bytes | None = None) -> bytes:
        """The bytes behind a path of the server, or behind another address. Raises RequestError."""
        url = path if "://" in path else f"{self.url}/{path.lstrip('/')}"
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise RequestError(f"the image's address is neither http nor https ({url[:100]})", again=False)
        headers = {"User-Agent": f"specbench/{__version__}", "Accept": "*/*"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            request = urllib.request.Request(url, body, headers)  # noqa: S310
            if (key := os.environ.get(KEY)) and urllib.parse.urlsplit(url).netloc == self._host:
                request.add_unredirected_header("Authorization", f"Bearer {key}")
            with urllib.request.urlopen(request, timeout=_left(deadline)) as answer:  # noqa: S310
                return _body(answer, deadline)
        except urllib.error.HTTPError as e:
            with e:
                raise _refused(e, deadline) from e
        except http.client.HTTPException as e:
            raise RequestError(f"no complete answer ({type(e).__name__})") from e
        except (OSError, ValueError) as e:  # unreachable, reset, too late; an address that is none
            reason = getattr(e, "reason", None) or e
            late = isinstance(e, TimeoutError) or isinstance(reason, TimeoutError)
            text = f"no answer within {self.timeout:g} s" if late else f"{type(reason).__name__}: {reason}"
            raise RequestError(text, again=isinstance(e, OSError)) from e


def _left(deadline: float) -> float:
    """Seconds until a deadline. Raises TimeoutError after it."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _body(answer: Any, deadline: float) -> bytes:
    """An answer's bytes, read piece by piece: a server that sends a byte a second never ends otherwise."""
    found = io.BytesIO()
    while piece := answer.read1(1 << 16):
        found.write(piece)
        _left(deadline)
        if found.tell() > LARGEST:
            raise RequestError(f"the answer is larger than {LARGEST >> 20} MiB", again=False)
    wanted = answer.headers.get("Content-Length")
    if wanted and wanted.isdecimal() and found.tell() < int(wanted):
        raise RequestError(f"the answer ends after {found.tell()} of {wanted} bytes")
    return found.getvalue()


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError("the answer is not a JSON object")
    return found


def _refused(error: urllib.error.HTTPError, deadline: float) -> RequestError:
    """What a status code means, with the server's own words: {"error": {"message": ...}} or {"detail": ...}."""
    try:
        text = _body(error, min(deadline, time.monotonic() + 5))[:20_000].decode("utf-8", "replace")
        told = json.loads(text)
        detail = told.get("error") or told.get("detail") or told.get("message") or ""
        text = str(detail.get("message", detail) if isinstance(detail, dict) else detail)
    except (OSError, ValueError, AttributeError, RecursionError, RequestError, http.client.HTTPException):
        text = ""
    reason = f"HTTP {error.code}{f': {text}' if text else ''}"
    return RequestError(reason, error.code in _AGAIN, _retry_after(error.headers.get("Retry-After")))


def _retry_after(text: str | None) -> float | None:
    """Seconds in a Retry-After header: a number, or a date."""
    if not text:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
