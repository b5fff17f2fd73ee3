"""Decodes the prompts of a run that have no record yet, and records every image and every other event."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, Protocol

from specbench import data
from specbench.config import indices
from specbench.config.run_config import RunConfig
from specbench.errors import RunError
from specbench.harness import cluster
from specbench.harness.folder import DecodingFailure, RunFolder, RunRecords
from specbench.harness.log import LOG, say, stop_on_interrupt, warn
from specbench.harness.worker import Died, Event, Failure, Image, Joined, Loader, Shrunk, Worker
from specbench.rows.journal import Journal, Record
from specbench.rows.provenance import DecodingProcess, decoding_hash, utc
from specbench.storage.files import format_size
from specbench.storage.progress import tqdm


class Executor(Protocol):
    """A `worker.Worker` in this process, or `cluster.Workers` in others."""

    def decode(self, items: Sequence[data.Item], baseline: bool, stop: Callable[[], bool]) -> Iterator[list[Event]]: ...


class Execution:
    """The decoding of a run in its folder.

    Args:
        cfg: checked parameters.
        folder: the run's folder, opened.
        loader: makes the pipeline.
    """

    def __init__(self, cfg: RunConfig, folder: RunFolder, loader: Loader) -> None:
        self.cfg, self.folder, self.loader = cfg, folder, loader
        self._announced = False
        self._failed = 0  # images
        self._left = 0  # images to decode, of both passes
        self._hashes = decoding_hash(cfg), decoding_hash(cfg, baseline=True)

    def decode_missing(self, records: RunRecords, items: Sequence[data.Item]) -> None:
        """Decodes the missing images of both passes; items: one for each image.

        Raises RunError if some failed, and KeyboardInterrupt if the user stopped the run.
        """
        passes = {False: records.method}  # by `baseline`
        if records.vanilla is not None:
            passes[True] = records.vanilla

        def in_none_of(*journals: Journal) -> list[data.Item]:
            return [item for item in items if not any(item.index in journal for journal in journals)]

        self._left = sum(len(in_none_of(journal)) for journal in passes.values())
        with self._executor() as executor, stop_on_interrupt() as stop:
            timed = executor if isinstance(executor, Worker) and executor.is_timed else None
            if timed is not None and len(passes) == 2:  # seconds are compared in pairs, one directly after the other
                left = in_none_of(*passes.values())
                self._record(timed.decode_pairs(left, stop), passes, len(left), len(items), stop)
            # Without pairs all images; with pairs those whose other side an earlier start had finished.
            for baseline, journal in passes.items():
                left = in_none_of(journal)
                self._record(executor.decode(left, baseline, stop), {baseline: journal}, len(left), len(items), stop)
            if timed is not None and not self._failed:
                self._measure_further(timed, records, items, stop)
        if self._failed:
            raise RunError(
                f"{self._failed} images could not be decoded (see {self.folder.failures}); the others are done. The"
                " same command tries them again"
            )

    @contextmanager
    def _executor(self) -> Iterator[Executor]:
        if cluster.is_used(self.cfg):
            with cluster.Workers(self.cfg, self.loader) as workers:
                yield workers
            return
        say(f"loading {self.cfg.model}")
        worker = Worker(self.cfg, self.loader)
        say(f"loaded in {worker.joined.process.loaded_s:.1f} s")
        self._join(worker.joined)
        yield worker

    def _measure_further(
        self, worker: Worker, records: RunRecords, items: Sequence[data.Item], stop: Callable[[], bool]
    ) -> None:
        """Decodes pairs again while the timing is unsteady: a quarter of the images at a time, from the first image
        on, each at most once more. Only their seconds are recorded."""
        unused, size = records.to_time_again, 2 * int(self.cfg.batch)
        remaining = [item for item in items if item.index in unused]
        size *= -(-len(items) // (4 * size))
        while remaining and records.to_time_again:
            say(f"the speed-up in seconds is not steady: decoding {len(remaining[:size])} images of each side again")
            for event in chain.from_iterable(worker.decode_pairs(remaining[:size], stop)):
                if isinstance(event, Image):
                    records.again.add(self._completed(event))
            remaining = remaining[size:]
            if stop():
                raise KeyboardInterrupt

    def _record(
        self,
        decoded: Iterator[list[Event]],
        journals: Mapping[bool, Journal],
        left: int,
        count: int,
        stop: Callable[[], bool],
    ) -> None:
        """Records events as they arrive. journals: of the method (key False), of vanilla (True), or of both; `left` of
        `count` prompts have no image yet. Raises KeyboardInterrupt if the user stopped the run."""
        if not left:
            return
        from specbench.decoding.batch import watched

        title, per_prompt = " and ".join(map(self._label, journals)), len(journals)
        # Without a terminal, an occasional line shows that the run is alive.
        interval = 0.2 if sys.stderr.isatty() else 20.0
        recorded, in_progress = per_prompt * (count - left), 0.0

        def show(part: float) -> None:
            """Moves the bar to the recorded images and this part of the batch in progress. A worker in another process
            reports only its images."""
            nonlocal in_progress
            in_progress = part
            bar.n = recorded + (round(part, 1) if round(part, 1) % 1 else round(part))
            bar.update(0)

        with (
            tqdm(total=per_prompt * count, initial=recorded, desc=title, unit="image", mininterval=interval) as bar,
            watched(show),
        ):
            for events in decoded:
                for event in events:
                    if isinstance(event, Image):
                        record = self._completed(event)
                        journals[event.baseline].add(record, event.pixels)
                        how = f"{record.steps} steps, {record.decode_s:.3f} s"
                        LOG.info("%s: %s in %s", self._label(event.baseline), record.image, how)
                        recorded += 1
                        show(max(0.0, in_progress - 1))
                    else:
                        self._handle_other(event)
        if stop():
            raise KeyboardInterrupt

    def _completed(self, image: Image) -> Record:
        """The record of an image, with the hash of the configuration."""
        return replace(image.record, config=self._hashes[image.baseline])

    def _label(self, baseline: bool) -> str:
        return "vanilla" if baseline else str(self.cfg.method)

    def _handle_other(self, event: Event) -> None:
        """Records and prints every event except an image."""
        if isinstance(event, Joined):
            self._join(event)
        elif isinstance(event, Shrunk):
            smallest = self.folder.metadata().smallest_batch or event.batch
            self.folder.update_metadata(smallest_batch=min(event.batch, smallest))
            warn(f"out of memory: continuing in batches of {event.batch}")
        elif isinstance(event, Failure):
            self._failed += 1
            label = self._label(event.baseline)
            self.folder.add_failure(DecodingFailure(utc(), label, event.index, event.reason))
            warn(f"{label}: image {indices.label(event.index)} failed: {event.reason}")
        elif isinstance(event, Died):
            warn(f"{event.reason}; another worker decodes its images")

    def _join(self, joined: Joined) -> None:
        """Records a decoding process in run.json. Raises UsageError if its weights or device differ from an
        earlier process's."""
        for name in ("weights", "device"):
            self.folder.check_same(name, getattr(joined.process, name))
        entries: dict[str, Any] = {"sessions": {**self.folder.metadata().sessions, joined.name: joined.process}}
        if not self._announced:
            entries["begun"] = time.time()  # of the latest start; `specbench status` computes the speed from it
            self._announced = True
            self._announce(joined.process)
        self.folder.update_metadata(**entries)
        LOG.info("session %s: %s", joined.name, json.dumps(asdict(joined.process)))

    def _announce(self, process: DecodingProcess) -> None:
        """Prints the disk space that the missing images need, before the first one is decoded."""
        left = self._left
        if not left:
            return
        # An image needs at most the size of its pixels, a record a few bytes per token.
        most = left * (3 * process.resolution**2 + 12 * process.tokens + 2000)
        free = shutil.disk_usage(self.folder.path).free
        text = (
            f"{left} images to decode: at most {format_size(most)} in {self.folder}, where {format_size(free)} are free"
        )
        if most > free:
            warn(f"{text}: the disk may fill up; finished images stay, and the run can be continued")
        else:
            LOG.info("%s", text)
            say(text)
