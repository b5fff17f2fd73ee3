"""A worker: a loaded pipeline that yields a record of every decoded image. It needs prompts, but no folder.

A run has one worker in its own process, or several in other processes (see `cluster`). A worker yields events, and the
process that owns the run's folder records them.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench import data
from specbench.config import indices, parameters
from specbench.config.run_config import RunConfig
from specbench.decoding import image_statistics
from specbench.rows import degenerate, timing
from specbench.rows.journal import Record, pixel_digest
from specbench.rows.provenance import DecodingProcess
from specbench.storage import origin

if TYPE_CHECKING:
    import torch

    from specbench.harness.pipeline import BasePipeline, Finished

    Loader = Callable[[RunConfig], BasePipeline]
else:  # the annotation is evaluated where pipelines are not imported
    Loader = Callable[[RunConfig], Any]


@dataclass(frozen=True)
class Joined:
    """A process is ready to decode. name: the key of its entry in run.json."""

    name: str
    process: DecodingProcess


@dataclass(frozen=True)
class Image:
    """A finished image of the method, or of the baseline; pixels: (H, W, 3) uint8."""

    record: Record
    pixels: np.ndarray
    baseline: bool = False


@dataclass(frozen=True)
class Shrunk:
    """Out of memory: from now on, `batch` prompts are decoded together."""

    batch: int


@dataclass(frozen=True)
class Failure:
    """An image of the method, or of the baseline, that could not be decoded, even alone."""

    index: int
    reason: str
    baseline: bool


@dataclass(frozen=True)
class Died:
    """A decoding process died; other processes take over its images."""

    reason: str


Event = Joined | Image | Shrunk | Failure | Died


def never() -> bool:
    return False


class Worker:
    """A pipeline and, on request, the baseline of the same target.

    Args:
        loader: makes the pipeline.
        num_workers: processes that decode for the run at the same time.
    """

    def __init__(self, cfg: RunConfig, loader: Loader, num_workers: int = 1) -> None:
        self.cfg = cfg
        self.is_timed = timing.is_timed(cfg) and num_workers == 1
        self._timed = 0  # batches timed so far
        started = time.perf_counter()
        self._pipeline = loader(cfg)
        self._vanilla: BasePipeline | None = None
        self._batch: int = cfg.batch
        self._positions = {index: i for i, index in enumerate(indices.of_run(cfg))}
        self._warm: set[tuple[bool, int]] = set()  # passes and sizes of batches whose warm-up is done
        process = DecodingProcess(
            **origin.environment(self._pipeline.device),
            weights=self._pipeline.weights,
            resolution=self._pipeline.resolution,
            tokens=self._pipeline.tokens_per_image,
            workers=num_workers,
            plugins="; ".join(parameters.plugins_of(cfg.plain())),
            pid=os.getpid(),
            started=datetime.now(UTC).isoformat(timespec="microseconds"),
            loaded_s=round(time.perf_counter() - started, 1),
            prompt_length=cfg.get("prompt_length"),
        )
        self.joined = Joined(secrets.token_hex(4), process)

    def decode_pairs(self, items: Sequence[data.Item], stop: Callable[[], bool]) -> Iterator[list[Event]]:
        """Decodes each image with the method and with vanilla AR, one directly after the other, and yields the same
        events as `decode`; with a batch size above 1, batch by batch. Images (batches) with an even position start with
        the method, the others with vanilla AR: the ABBA order, which an interruption does not change. After `stop`
        returns true, the pair in progress is finished.
        """
        left = list(items)
        while left and not stop():
            for baseline in (False, True):  # no warm-up between the halves of a pair
                try:
                    self._ready(left, baseline)
                except Exception as e:
                    if not out_of_memory(e):
                        raise
                    # `decode` will take smaller batches.
            size = self._batch
            pair, left = left[:size], left[size:]
            vanilla_first = self._positions[pair[0].index] // size % 2 == 1
            for baseline in (vanilla_first, not vanilla_first):
                self._timed += 1
                # A separate peak for each half, although both pipelines are loaded.
                reset_peak_memory(self._pipeline.device)
                yield from self.decode(pair, baseline, number=self._timed)

    def decode(
        self,
        items: Sequence[data.Item],
        baseline: bool,
        stop: Callable[[], bool] = never,
        number: int | None = None,
    ) -> Iterator[list[Event]]:
        """Decodes prompts with the method, or with vanilla AR, and yields events as they happen. After `stop` returns
        true, images in progress are finished and no new ones are started.

        If the memory is too small, the remaining prompts are decoded in batches of half the size. An image that is too
        large alone is a `Failure`. number: the number of these prompts among the timed batches; None: each batch gets
        a new number.
        """
        left = list(items)
        while left and not stop():
            done: set[int] = set()
            try:
                pipeline = self._ready(left, baseline)
                part = left[: self._batch] if self.is_timed else left  # a stream has no seconds of a batch
                keys = [(self.cfg.seed, item.index) for item in part]
                for finished in pipeline.stream([item.prompt for item in part], keys, self._batch, stop):
                    if self.is_timed and number is None:
                        self._timed += 1
                    timed = (number or self._timed) if self.is_timed else None
                    made = self._images(pipeline, finished, part, baseline, timed)
                    done |= {image.record.index for image in made}
                    yield [*made]
                left = [item for item in left if item.index not in done]
                continue
            except Exception as e:
                if not out_of_memory(e):
                    raise
                reason = " ".join(str(e).split()) or type(e).__name__
            # After the handler, which would keep the frames with their tensors alive.
            _release(self._pipeline.device)
            left = [item for item in left if item.index not in done]
            if self._batch > 1:
                self._batch //= 2
                yield [Shrunk(self._batch)]
            else:
                yield [Failure(left.pop(0).index, f"out of memory: {reason[:300]}", baseline)]

    def _ready(self, items: Sequence[data.Item], baseline: bool) -> BasePipeline:
        """The pipeline of a pass; if the run is timed, warmed up with each size of the batches of `items`: an engine
        records its graphs for each size."""
        from specbench.decoding.batch import watched

        if baseline and self._vanilla is None:
            self._vanilla = self._pipeline.vanilla()
        pipeline = self._vanilla if baseline and self._vanilla is not None else self._pipeline
        last = len(items) % self._batch
        for batch in (items[: self._batch], items[len(items) - last :]) if self.is_timed else ():
            if not batch or (baseline, len(batch)) in self._warm:
                continue
            for _ in range(self.cfg.warmup):
                conditioning = pipeline.encode([item.prompt for item in batch])
                with watched(None):
                    warm = pipeline.decode(conditioning, [(self.cfg.seed, item.index) for item in batch])
                pipeline.pixels(warm.tokens)
            reset_peak_memory(pipeline.device)
            self._warm.add((baseline, len(batch)))
        return pipeline

    def _images(
        self,
        pipeline: BasePipeline,
        finished: Finished,
        items: Sequence[data.Item],
        baseline: bool,
        timed: int | None,
    ) -> list[Image]:
        """A record and the pixels of each finished image; items: the requested prompts; timed: see `Record`."""
        decoded, rows = finished.decoded, len(finished.which)
        pipeline.synchronize()
        before_pixels = time.perf_counter()
        images = pipeline.pixels(decoded.tokens)
        done = time.perf_counter()
        peak = peak_memory_mib(pipeline.device)
        codes = pipeline.codes(decoded.tokens)
        tokens = int(decoded.tokens.shape[1])
        steps, drafted, accepted = decoded.steps.tolist(), decoded.drafted.tolist(), decoded.accepted.tolist()
        trace_fields = image_statistics.of_images(decoded.trace, steps, pipeline.passes)
        alone = self.cfg.batch == 1 and timed is not None
        return [
            Image(
                Record(
                    index=item.index,
                    prompt=item.prompt,
                    seed=self.cfg.seed,
                    tokens=tokens,
                    steps=steps[b],
                    drafted=drafted[b],
                    accepted=accepted[b],
                    accepted_length=tokens / steps[b],
                    latency_s=decoded.seconds if alone else None,
                    decode_s=decoded.seconds / rows,
                    text_s=finished.text_s / rows,
                    pixels_s=(done - before_pixels) / rows,
                    batch=finished.batch,
                    peak_memory_mib=peak,
                    image=f"{'baseline' if baseline else 'images'}/{indices.file_name(item.index)}",
                    sha256=pixel_digest(images[b]),
                    session=self.joined.name,
                    timed=timed,
                    unread=pipeline.unread_tokens(item.prompt),
                    id=item.id,
                    category=item.kind,
                    done=time.time(),
                    **degenerate.statistics(images[b], None if codes is None else codes[b]),
                    **trace_fields[b],
                ),
                images[b],
                baseline,
            )
            for b, item in enumerate(items[i] for i in finished.which)
        ]


def out_of_memory(error: BaseException) -> bool:
    """Whether the memory of the device or of the host was too small. (PyTorch's CPU allocator has no own exception.)"""
    import torch

    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in text for words in ("can't allocate memory", "out of memory", "alloc_failed"))
    )


def _release(device: torch.device) -> None:
    """Frees unreferenced memory."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new peak on a CUDA device or, for resident memory, on Linux (proc(5), clear_refs)."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory so far in MiB: allocated on a CUDA device, otherwise resident in the process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**20
    with suppress(OSError):
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if peak:
            return int(peak[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024  # bytes in a unit of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
