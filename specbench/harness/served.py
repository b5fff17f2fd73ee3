"""Images from a server: requests at a fixed concurrency or at random arrival times, retries, and the records.

With `request_rate`, requests arrive at random: the gaps between them are exponential and come from a generator keyed by
`seed`, so that the same run has the same arrivals. A latency then starts at the arrival, even if `concurrency` delays
the request; at a fixed concurrency it starts when the request is sent. It ends with the complete answer, and includes
failed attempts and the waits between them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench import data
from specbench.config import indices, registry
from specbench.errors import RunError, UsageError
from specbench.harness.log import say, warn
from specbench.harness.worker import Event, Failure, Image, Joined, never
from specbench.rows import degenerate
from specbench.rows.journal import Record, pixel_digest
from specbench.storage import origin
from specbench.storage.images_client import ImagesClient, Reply, RequestError, ServerKind
from specbench.storage.package import __version__

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before the second attempt, doubled each time; the maximum
GIVE_UP = 10  # a run stops after this many failed images in a row
_TICK = 0.5  # seconds until a Ctrl-C is noticed


def seed_of(seed: int, index: int) -> int:
    """The seed of a request: 31 pseudo-random bits from the key of an image, (seed, prompt index)."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:4]) >> 1


def arrivals(seed: int, n: int, rate: float | None) -> np.ndarray:
    """Gaps (n,) in seconds before the arrivals of n requests: exponential with mean 1 / rate; 0 without a rate."""
    if rate is None:
        return np.zeros(n)
    return np.random.default_rng(seed).exponential(1 / rate, n)


@dataclass(frozen=True)
class _Answer:
    """The end of a request. result: its image, or why there is no image; None: given up because the run stops."""

    item: data.Item
    result: Reply | RequestError | None
    seconds: float
    attempts: int


class ServerExecutor:
    """A server as an executor (`execution.Executor`). Raises UsageError if it does not answer, or refuses the first
    request."""

    def __init__(self, cfg: Mapping[str, Any], items: Sequence[data.Item]) -> None:
        self.cfg = cfg
        self._client = ImagesClient(cfg["url"], cfg["timeout"])
        kind = registry.find("engine", cfg["engine"])
        kind.check(cfg)
        self._kind: ServerKind = kind(cfg)
        self._first: dict[int, str] = {}  # image index -> the digest of the warm-up's image
        self._stopping = threading.Event()
        started = time.perf_counter()
        try:
            reported, names = self._client.identity()
        except RequestError as e:
            raise UsageError(
                f"the server at url={cfg['url']} does not answer ({e}): start it, or correct url="
            ) from None
        if cfg["model_name"] and names and cfg["model_name"] not in names:
            warn(f"the server names its model {', '.join(names[:3])}, not {cfg['model_name']}")
        model = cfg["model_name"] or (names[0] if names else "")
        if not model:
            raise UsageError("the server does not name its model: set model_name=")
        server = cfg["server"] or reported
        say(f"{cfg['url']}: {server or 'an unnamed server'}, model {model}")
        for item in items[:1] * cfg["warmup"]:
            try:
                self._first[item.index] = pixel_digest(self._ask(item).pixels)
            except RequestError as e:
                if not e.again:
                    what = "refuses a request" if e.__cause__ else "answers a request wrongly"
                    raise UsageError(f"the server {what} ({e})") from None
                warn(f"a request before the first measured request failed: {e}")
        self.joined = Joined.now(
            cfg,
            started,
            specbench=__version__,
            commit=origin.commit(),
            python=platform.python_version(),
            model=model,
            server=server,
            # A resumed run must have the same server. (Its address may change.)
            weights=f"{model} by {server or 'an unnamed server'}",
            device="served",
            resolution=None,
            tokens=None,
        )

    def decode(
        self, items: Sequence[data.Item], baseline: bool = False, stop: Callable[[], bool] = never
    ) -> Iterator[list[Event]]:
        """Requests images and yields them as they arrive. After `stop` returns true, requests in progress are finished
        and no new ones are sent. RunError after `GIVE_UP` failures in a row."""
        rate, limit = self.cfg["request_rate"], self.cfg["concurrency"]
        limit = limit or (1 if rate is None else len(items))
        positions = {index: i for i, index in enumerate(indices.of_run(self.cfg))}
        gaps = arrivals(self.cfg["seed"], len(positions), rate)
        dues = time.monotonic() + np.cumsum(gaps[[positions[item.index] for item in items]])
        answers: queue.SimpleQueue[_Answer | BaseException] = queue.SimpleQueue()
        sent, in_progress, failed = 0, 0, 0
        while in_progress or sent < len(items):
            if stop():
                self._stopping.set()
                if not in_progress:
                    return
            now = time.monotonic()
            while sent < len(items) and not self._stopping.is_set() and in_progress < limit and dues[sent] <= now:
                due = float(dues[sent]) if rate is not None else now
                threading.Thread(target=self._work, args=(items[sent], due, answers), daemon=True).start()
                sent, in_progress = sent + 1, in_progress + 1
            wait = max(0.0, float(dues[sent]) - now) if sent < len(items) and in_progress < limit else _TICK
            try:
                answer = answers.get(timeout=min(wait, _TICK))
            except queue.Empty:
                continue
            in_progress -= 1
            if isinstance(answer, BaseException):
                raise answer
            if isinstance(answer.result, RequestError):
                failed += 1
                yield [Failure(answer.item.index, f"{answer.result} (attempt {answer.attempts})")]
                if failed >= GIVE_UP:
                    self._stopping.set()
                    raise RunError(
                        f"{failed} images in a row failed, the last one with: {answer.result}; finished images are"
                        " kept, and the same command continues"
                    )
            elif answer.result is not None:
                failed = 0
                yield [self._image(answer, answer.result)]

    def _work(self, item: data.Item, due: float, answers: queue.SimpleQueue[_Answer | BaseException]) -> None:
        try:
            answers.put(self._request(item, due))
        except BaseException as e:  # the main thread raises it
            answers.put(e)

    def _request(self, item: data.Item, due: float) -> _Answer:
        """One image, with up to `retries` further attempts."""
        attempt = 0
        # A random part in each wait, so that requests that failed together are not repeated together.
        spread = np.random.default_rng([self.cfg["seed"], item.index])
        while True:
            attempt += 1
            try:
                result: Reply | RequestError = self._ask(item)
            except RequestError as e:
                result = e
            seconds = time.monotonic() - due
            if not isinstance(result, RequestError) or not result.again or attempt > self.cfg["retries"]:
                return _Answer(item, result, seconds, attempt)
            wait = FIRST_WAIT * 2 ** (attempt - 1) * spread.uniform(0.5, 1)
            if self._stopping.wait(min(max(wait, result.wait or 0.0), LONGEST_WAIT)):
                return _Answer(item, None, seconds, attempt)

    def _ask(self, item: data.Item) -> Reply:
        """One request. Raises RequestError."""
        fields = self._kind.fields(item.prompt, seed_of(self.cfg["seed"], item.index))
        for name, value in json.loads(self.cfg["extra_body"] or "{}").items():  # objects are merged
            both_objects = isinstance(value, dict) and isinstance(fields.get(name), dict)
            fields[name] = {**fields[name], **value} if both_objects else value
        return self._kind.read(self._client.post(self._kind.path, fields))

    def _image(self, answer: _Answer, reply: Reply) -> Image:
        pixels, digest = reply.pixels, pixel_digest(reply.pixels)
        first = self._first.get(answer.item.index)
        record = Record(
            index=answer.item.index,
            prompt=answer.item.prompt,
            seed=self.cfg["seed"],
            tokens=reply.tokens or 0,
            steps=0,
            drafted=0,
            accepted=0,
            accepted_length=0.0,
            latency_s=None,
            decode_s=answer.seconds,
            text_s=0.0,
            pixels_s=0.0,
            batch=1,
            peak_memory_mib=0.0,
            image=f"images/{indices.file_name(answer.item.index)}",
            sha256=digest,
            session=self.joined.name,
            accepted_per_step=[],
            accepted_by_depth=[],
            verified_by_depth=[],
            draft_passes=0,
            request_s=answer.seconds,
            attempts=answer.attempts,
            ar_s=reply.ar_s,
            repeated=None if first is None else int(first == digest),
            id=answer.item.id,
            category=answer.item.kind,
            size=[pixels.shape[1], pixels.shape[0]] if self._kind.has_images else None,
            **degenerate.statistics(pixels if self._kind.has_images else None, reply.codes),
            done=time.time(),
        )
        return Image(record, pixels)
