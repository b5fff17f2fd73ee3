"""One run, from its configuration to its row: prompts -> images and a record each -> metrics -> one row.

    row = execute(configuration.compose(["method=cool_sd", "delta=1.1", "n=16"]), "first")

The folder of a run is its memory. Every image has a record (see `rows.journal`), and the key of its random stream is
(seed, prompt index). The same configuration in the same folder therefore continues where it stopped and ends with the
images of an uninterrupted run. `n`, `metrics` with their inputs, and `baseline` may change between two runs in one
folder, and the row loses nothing (see `merge`): a larger n adds prompts, other metrics join those of the row,
`baseline=false` leaves the speed-ups where the baseline's images exist, and values that no longer hold are computed
again or named. A smaller n shows its row and leaves row.csv over the larger one. Other prompts, and any other parameter
but `data_dir`, would mix two measurements in one row, and are refused. The folder also caches the per-image outputs of
the metrics' networks (see `metrics.outputs`).
"""

from __future__ import annotations

import copy
import errno
import json
import logging
import logging.handlers
import secrets
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from omegaconf import OmegaConf
from tqdm import tqdm

from specbench import data, metrics
from specbench.config import parameters, protocols
from specbench.errors import RunError, UsageError
from specbench.harness import merge, sheet, worker
from specbench.harness.worker import Died, Event, Failure, Image, Joined, Loader, PromptDecoder, Shrunk, Worker
from specbench.rows import provenance, summary
from specbench.rows.columns import COLUMNS, stderr_of
from specbench.rows.csv_files import as_read, read_rows, to_csv
from specbench.rows.journal import Journal, read_memory
from specbench.storage import home
from specbench.storage.files import append_line, format_size, is_temporary, locked, sha256, write_atomically


class Executor(Protocol):
    """An executor: a `worker.Worker` in this process, or a `cluster.Workers` in others."""

    def decode(self, items: Sequence[data.Item], baseline: bool, stop: Callable[[], bool]) -> Iterator[list[Event]]: ...


#: Parameters that may change between two runs in the same folder.
MAY_CHANGE = ("n", "metrics", "metrics_dir", "reference", "baseline", "out", "data_dir", "workers", "ray_address")

#: The file in a run's folder with the images that could not be decoded, one per line; `specbench status` shows them.
FAILURES = "failures.jsonl"

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)  # errors that no other argument can fix

_LOG_BYTES, _LOG_FILES = 10 * 2**20, 3  # of run.log, and how many older ones stay

_UNMEASURED = "cannot be measured here: "

_LOG = logging.getLogger("specbench")


class Stopped(KeyboardInterrupt):
    """The user stopped a run. The message gives its progress and its folder."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


def execute(cfg: Mapping[str, Any], out: str | Path | None = None, *, loader: Loader | None = None) -> dict[str, Any]:
    """Runs a configuration, or the rest of it, in its folder, and returns its row (`COLUMNS`).

    Args:
        cfg: flat parameters, as `configuration.compose` gives them.
        out: the run's folder; None takes `cfg["out"]`, and where that is None, too, a new one under runs/.
        loader: makes the pipeline; None takes `specbench.harness.pipeline.Pipeline.load`.

    Raises UsageError for bad parameters, absent weights and a folder that holds something else, RunError where the disk
    or the memory did not suffice, and Stopped on Ctrl-C: the first one finishes the current image and writes a row over
    the finished images, the second one stops at once.
    """
    return Run(cfg, out, loader=loader).execute()


def new_folder(now: float | None = None) -> Path:
    """The default folder of a run that starts now: runs/<date>/<time>-<id>."""
    return Path("runs", time.strftime("%Y-%m-%d/%H-%M-%S", time.localtime(now)) + f"-{secrets.token_hex(3)}")


class Run:
    """A configuration and its folder. `asked` is the given configuration; after `execute`, `cfg` is that of the row,
    which may have more metrics and a baseline. `nothing_left` is then true if everything existed already. `larger` is
    the n of the folder's row if that covers more images than requested: it stays, and nothing is written."""

    def __init__(self, cfg: Mapping[str, Any], out: str | Path | None = None, *, loader: Loader | None = None) -> None:
        self.requested = data.counted(parameters.validate(cfg))
        self.cfg = self.requested
        self.folder = home.expanded(out or self.cfg["out"] or new_folder())
        self.nothing_left = False
        self.larger = 0
        self.scoring_device: str = self.cfg["device"]  # of the metrics' networks
        self.scoring_batch = metrics.ScoringContext.batch
        self._loader = loader or _load_pipeline
        self._made = False  # by this process
        self._announced = False
        self._failed = 0  # images, in this process
        # Vanilla AR is its own baseline. Its empty draft and one token per pass identify it, not the preset's name.
        self.is_vanilla = self.cfg["drafter"] == "none" and not self.cfg.get("iterations")
        self._before: dict[str, Any] | None = None  # the folder's row
        self._had: list[str] = []  # its metrics

    @property
    def wants_baseline(self) -> bool:
        return self.cfg["baseline"] and not self.is_vanilla

    @property
    def row_path(self) -> Path:
        return self.folder / "row.csv"

    @property
    def sheet_path(self) -> Path:
        return self.folder / "contact_sheet.png"

    def execute(self) -> dict[str, Any]:
        """See `execute`."""
        with self._opened():
            self._take_over(self._check_folder())
            method = Journal(self.folder / "records.jsonl")
            vanilla = Journal(self.folder / "baseline.jsonl") if self.wants_baseline else None
            try:
                return self._execute(method, vanilla)
            except KeyboardInterrupt:
                done = self._done(method, vanilla)
                _LOG.info("stopped by the user with %s", done)
                part = self._row_so_far(method, vanilla)
                row = f", a row over the first {part} in its row.csv" if part else ""
                raise Stopped(f"stopped with {done} done in {self.folder}{row}", self.folder) from None
            except (UsageError, RunError) as e:
                _LOG.error("%s", e)
                if isinstance(e, UsageError) and self._made and not method.records:
                    shutil.rmtree(self.folder)  # a run that could not start leaves nothing
                raise
            except Exception as e:
                _LOG.exception("failed" if not self._disk(e) else "cannot write")
                raise

    def _done(self, method: Journal, vanilla: Journal | None) -> str:
        """The progress of the run, as text."""
        n = self.cfg["n"]
        done = f"{n - len(method.missing(n))} of {n} images"
        return done + (f" and {n - len(vanilla.missing(n))} of {n} baseline images" if vanilla is not None else "")

    def _row_so_far(self, method: Journal, vanilla: Journal | None) -> int:
        """Writes the unscored row of a stopped run over the images before the first missing one, and returns their
        number. It is the row of a run with that n, and without a baseline if the baseline lacks images."""
        n = next(iter(method.missing(self.cfg["n"])), self.cfg["n"])
        reference = vanilla if vanilla is not None and not vanilla.missing(n) else None
        if not n or (self._before and (self._before["n"] or 0) >= n):
            return 0
        part = copy.copy(self)
        part.cfg = self.cfg | {"n": n, "metrics": []}
        if vanilla is not None and reference is None:
            part.cfg |= {"baseline": False}
        row = part._row(method, reference, data.load(part.cfg), {})
        if self._before and merge.changes(self._before, row | {"n": self._before["n"]}, {}):
            return 0  # the row of fewer images has more values
        row["note"] = "; ".join(filter(None, [f"stopped after {n} of {self.cfg['n']} images", row["note"]]))
        self._put(row, method, {})
        return n

    def _execute(self, method: Journal, vanilla: Journal | None) -> dict[str, Any]:
        n = self.cfg["n"]
        # Weights trained since do not belong to a finished run. (A custom loader has its own weights.)
        if self._loader is _load_pipeline and (here := _weights_here(self.cfg)) is not None:
            self._check_same("weights", here)
        left = bool(method.missing(n) or (vanilla is not None and vanilla.missing(n)))
        self.nothing_left = not left and bool(self.larger)
        bases = self._bases()
        self._name_metrics(method, bases)
        if not left and self.sheet_path.exists() and (row := self._finished_row(method, bases)):
            _check_prompts(method, _prompts_here(self.cfg))
            self._write_config()
            self.nothing_left = True
            _LOG.info("nothing left to do")
            return row
        items = data.load(self.cfg)
        for journal in (method, vanilla):
            if journal is not None:
                _check_prompts(journal, items)
        self._write_config()
        if left:
            for name in self.cfg["metrics"]:
                if bases[name].startswith(_UNMEASURED):
                    _say(f"{name} {bases[name]}")
            self._decode_missing(method, vanilla, items)
        return self._draw_up(method, vanilla, items, bases)

    def rescore(self) -> dict[str, Any]:
        """Computes the metrics of a run with all its images, and builds its row again. Decodes nothing and needs only
        the weights of the metrics. UsageError where images are missing."""
        with self._opened():
            method = Journal(self.folder / "records.jsonl")
            vanilla = Journal(self.folder / "baseline.jsonl") if self.wants_baseline else None
            n = self.cfg["n"]
            for journal in (method, vanilla):
                if journal is not None and (missing := journal.missing(n)):
                    raise UsageError(
                        f"{self.folder} has {n - len(missing)} of the {n} images in {journal.path.name}: finish it"
                        f" first, with the `specbench run` that started it and out={self.folder}"
                    )
            items = _prompts_here(self.cfg) or _prompts_of(method, self.cfg)
            _check_prompts(method, items)
            self._take_over(self._check_folder())
            bases = self._bases()
            self._name_metrics(method, bases)
            self._write_config()
            return self._draw_up(method, vanilla, items, bases)

    def alone(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The requested row, from the folder's row, which `execute` returned and which may have more metrics and a
        baseline."""
        requested = provenance.config_hash(self.requested)
        if row["config_hash"] == requested:
            return dict(row)
        part = copy.copy(self)
        part.cfg = self.requested
        filled = {
            c
            for name in self.requested["metrics"]
            if name in self.cfg["metrics"]
            for c in parameters.metric_columns(name)
        }
        scores = {column: one for column, one in merge.scores(row).items() if column in filled}
        method = Journal(self.folder / "records.jsonl")
        vanilla = Journal(self.folder / "baseline.jsonl") if part.wants_baseline else None
        return as_read(part._row(method, vanilla, data.load(part.cfg), quality(scores)))

    def _draw_up(
        self,
        method: Journal,
        vanilla: Journal | None,
        items: Sequence[data.Item],
        bases: Mapping[str, str],
    ) -> dict[str, Any]:
        """Scores the images, draws the sheet and writes the row. For fewer images than the folder's row covers, only
        returns the row."""
        if self.larger:
            scores = self._score(self.cfg["metrics"], method, items)
            return as_read(self._row(method, vanilla, items, quality(scores)))
        settled = self._settled(method, bases)
        old = merge.scores(self._before) if self._before and self._same_images(method) else {}
        scores = self._score([name for name in self.cfg["metrics"] if name not in settled], method, items)
        scores = self._yield_columns(scores, old, method, items)
        for text in merge.unmeasured(old, scores):
            self._warn(text)
        row = self._row(method, vanilla, items, quality(merge.both(old, scores)))
        if self._before:
            reasons = {column: one.note for column, one in scores.items() if one.note}
            if not self.wants_baseline:
                speedups = [c for c in COLUMNS if c.startswith("speedup") or "baseline" in c]
                why = "some images of the baseline are missing, which baseline=true decodes"
                reasons |= dict.fromkeys([*speedups, "draft_cost"], why)
            for text in merge.changes(self._before, row, reasons):
                self._warn(text)
        self._draw_sheet(row, method, vanilla, items)
        self._write_config()
        self._put(row, method, {name: basis for name, basis in bases.items() if self._decided(name)})
        _LOG.info("row written to %s", self.row_path)
        return as_read(row)  # the values that a later call would return

    def _put(self, row: Mapping[str, Any], method: Journal, bases: Mapping[str, str]) -> None:
        """Writes the row and then what determined its metrics."""
        write_atomically(self.row_path, to_csv([row]).encode())
        self._remember(self._memory() | {"metrics": dict(bases), "images": _images_hash(method, row["n"])})

    # --- the existing row of the folder -------------------------------------------------------------------------------

    def _take_over(self, theirs: Mapping[str, Any] | None) -> None:
        """Reads the folder's row, of which this run must lose nothing; `theirs`: the folder's configuration."""
        rows = read_rows(self.row_path) if theirs is not None and self.row_path.exists() else []
        if not rows:
            return
        self._before = rows[0]
        if (self._before["n"] or 0) > self.cfg["n"]:
            self.larger = self._before["n"]
            return
        assert theirs is not None
        scored = self._memory().get("metrics")
        known = parameters.single_metrics()
        self._had = [m for m in theirs["metrics"] if m in known and (scored is None or m in scored)]
        baseline = self.folder / "baseline.jsonl"
        if self._before["baseline_run_id"] and not self.cfg["baseline"] and baseline.exists():
            # Nothing is decoded for it: the speed-ups stay if all images of the baseline exist.
            self.cfg = self.cfg | {"baseline": not Journal(baseline).missing(self.cfg["n"])}

    def _same_images(self, method: Journal) -> bool:
        """Whether the folder's row covers the images that exist now."""
        n = self.cfg["n"]
        if not self._before or self._before["n"] != n or method.missing(n):
            return False
        images_hash = _images_hash(method, n)
        return self._memory().get("images", images_hash) == images_hash  # older versions did not record it

    def _settled(self, method: Journal, bases: Mapping[str, str]) -> set[str]:
        """The metrics whose current value is in the folder's row already."""
        if not self._same_images(method):
            return set()
        scored = self._memory().get("metrics", {})
        return {name for name, basis in bases.items() if scored.get(name) == basis}

    def _name_metrics(self, method: Journal, bases: Mapping[str, str]) -> None:
        """Chooses the metrics of the row: its existing ones and the requested ones. A requested metric wins a column
        that both fill, unless it was tried on these images and had no value."""
        if self.larger:
            return
        settled = self._settled(method, bases)
        requested = []
        for name in self.requested["metrics"]:
            if name in settled and name not in self._had and (others := merge.rivals(name, self._had)):
                _say(f"{name} could not be measured of these images: the row keeps {', '.join(others)}")
            else:
                requested.append(name)
        self.cfg = self.cfg | {"metrics": merge.names(self._had, requested)}

    def _yield_columns(
        self,
        scores: Mapping[str, metrics.Score],
        old: Mapping[str, metrics.Score],
        method: Journal,
        items: Sequence[data.Item],
    ) -> dict[str, metrics.Score]:
        """Returns columns to the metrics that had them where the new metric has no value."""
        found = dict(scores)
        for name in self.cfg["metrics"]:
            columns = [column for column in parameters.metric_columns(name) if column in scores]
            others = [m for m in merge.rivals(name, self._had) if m not in self.cfg["metrics"]]
            if not others or not columns or any(scores[column].value is not None for column in columns):
                continue
            self._warn(f"{name} could not be measured ({scores[columns[0]].note}): the row keeps {', '.join(others)}")
            remaining = [m for m in self.cfg["metrics"] if m != name]
            self.cfg = self.cfg | {
                "metrics": [
                    *(m for m in self._had if m in (*remaining, *others)),
                    *(m for m in remaining if m not in self._had),
                ]
            }
            for column in columns:
                del found[column]
            if not old:  # the old scores belong to other images
                found |= self._score(others, method, items)
        return found

    def _decided(self, name: str) -> bool:
        """Whether a metric has a column of the row, or had no value for one."""
        return name in self.cfg["metrics"] or name in self.requested["metrics"]

    # --- the folder ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Makes the folder, locks it against a second process, and logs into it."""
        self._made = not self.folder.exists()
        with locked(self.folder, self._check_ours):
            handler = _Log(self.folder / "run.log", maxBytes=_LOG_BYTES, backupCount=_LOG_FILES, encoding="utf-8")
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            _LOG.setLevel(logging.INFO)
            _LOG.propagate = False  # a traceback belongs in the log, not on the screen
            _LOG.addHandler(handler)
            try:
                yield
            except OSError as e:
                if why := self._disk(e):
                    raise RunError(
                        f"cannot write into {self.folder} any more ({why}); every recorded image is safe. Fix"
                        f" that, then continue with: specbench resume {shlex.quote(str(self.folder))}"
                    ) from None
                raise
            finally:
                _LOG.removeHandler(handler)
                _LOG.propagate = True
                handler.close()

    def _disk(self, error: Exception) -> str:
        """What is wrong with the disk, or with the folder on it; empty for other errors."""
        if not isinstance(error, OSError):
            return ""
        if not self.folder.is_dir():
            return "it is gone"
        return error.strerror or "error" if error.errno in _DISK else ""

    def _check_ours(self) -> None:
        """UsageError for a folder that holds other things."""
        if (self.folder / "config.yaml").exists():
            return
        # Files that a process killed before it wrote config.yaml can leave.
        others = {p.name for p in self.folder.iterdir() if not is_temporary(p)} - {".lock", "run.log"}
        if others:
            raise UsageError(
                f"{self.folder} holds {sorted(others)[0]} but no run; choose an empty or a new folder as out="
            )

    def _check_folder(self) -> dict[str, Any] | None:
        """Compares the configuration with the folder's, and returns the latter; None where there is none yet."""
        path = self.folder / "config.yaml"
        mine = self._kept_config()
        if not path.exists():
            return None
        try:
            theirs = dict(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
        except Exception:
            raise UsageError(f"cannot read {path}; choose another out=") from None
        different = [
            name
            for name in [*parameters.TABLE, *theirs]
            if name not in MAY_CHANGE and mine.get(name) != theirs.get(name)
        ]
        if different:
            shown = [name for i, name in enumerate(different) if name not in different[:i]][:3]
            raise UsageError(
                f"{self.folder} holds a run with {_values(theirs, shown)}, not {_values(mine, shown)};"
                " choose another out=, or give the parameters in its config.yaml to continue it"
            )
        return _completed({str(name): value for name, value in theirs.items()})

    def _kept_config(self) -> dict[str, Any]:
        return {name: value for name, value in self.cfg.items() if name != "out"}

    def _write_config(self) -> None:
        """Writes the configuration of the row into the folder."""
        if self.larger:
            return  # that row is not this one
        text = OmegaConf.to_yaml(OmegaConf.create(self._kept_config())).encode()
        path = self.folder / "config.yaml"
        if not path.exists() or path.read_bytes() != text:
            write_atomically(path, text)

    def _finished_row(self, method: Journal, bases: Mapping[str, str]) -> dict[str, Any] | None:
        """The row in the folder, if it is this configuration's and its metrics would give the same values today."""
        if not self._before or not set(self.cfg["metrics"]) <= self._settled(method, bases):
            return None
        same = self._same_images(method) and self._before["config_hash"] == provenance.config_hash(self.cfg)
        return self._before if same else None

    def _memory(self) -> dict[str, Any]:
        """run.json: the run's name, the processes that decoded for it, and what determined the metrics of its row."""
        path = self.folder / "run.json"
        if path.exists():
            return read_memory(path)
        return {"run_id": f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}", "sessions": {}}

    def _remember(self, memory: Mapping[str, Any]) -> None:
        write_atomically(self.folder / "run.json", (json.dumps(memory, indent=1) + "\n").encode())

    def _enter(self, joined: Joined) -> None:
        """Records a decoding process in run.json. Raises UsageError where its weights or device differ from those of
        earlier processes."""
        for name in ("weights", "device"):
            self._check_same(name, joined.session[name])
        memory = self._memory()
        memory["sessions"][joined.name] = joined.session
        if not self._announced:
            memory["begun"] = time.time()  # of the latest start, from which `specbench status` computes the speed
            self._announced = True
            self._announce(joined.session)
        self._remember(memory)
        _LOG.info("session %s: %s", joined.name, json.dumps(joined.session))

    def _check_same(self, name: str, mine: str) -> None:
        """Raises UsageError where an earlier process decoded with something else."""
        for other in self._memory()["sessions"].values():
            if other.get(name) != mine:
                raise UsageError(
                    f"{self.folder} was started with {name} {other.get(name)}, not {mine}: choose another out="
                )

    # --- decoding -----------------------------------------------------------------------------------------------------

    def _decode_missing(self, method: Journal, vanilla: Journal | None, items: Sequence[data.Item]) -> None:
        with self._executor() as executor, _patience() as stop:
            self._decode(executor, method, items, False, stop)
            if vanilla is not None and vanilla.missing(len(items)):
                self._decode(executor, vanilla, items, True, stop)
        if self._failed:
            raise RunError(
                f"{self._failed} images could not be decoded, see {self.folder / FAILURES}; the others are done. The"
                " same command tries them again"
            )

    @contextmanager
    def _executor(self) -> Iterator[Executor]:
        """The executor: a pipeline in this process, or workers in others."""
        if self.cfg["workers"] > 1 or self.cfg["ray_address"]:
            from specbench.harness import cluster

            with cluster.Workers(self.cfg, self._loader) as workers:
                yield workers
            return
        _say(f"loading {self.cfg['model']}")
        one = Worker(self.cfg, self._loader)
        _say(f"loaded in {one.joined.session['loaded_s']:.1f} s")
        self._enter(one.joined)
        yield one

    def _decode(
        self, executor: Executor, journal: Journal, items: Sequence[data.Item], baseline: bool, stop: Callable[[], bool]
    ) -> None:
        """Decodes the prompts that have no record yet, and records each image."""
        left = [items[i] for i in journal.missing(len(items))]
        label = "vanilla" if baseline else self.cfg["method"]
        # Without a terminal, an occasional line shows that the run is alive.
        interval = 0.2 if sys.stderr.isatty() else 20.0
        with tqdm(
            total=len(items), initial=len(items) - len(left), desc=label, unit="image", mininterval=interval
        ) as bar:
            for happened in executor.decode(left, baseline, stop):
                for event in happened:
                    if isinstance(event, Image):
                        journal.add(event.record, event.pixels)
                        record = event.record
                        _LOG.info("%s: %s in %d steps, %.3f s", label, record.image, record.steps, record.decode_s)
                        bar.update()
                    else:
                        self._note(event, label)
        if stop():
            raise KeyboardInterrupt

    def _note(self, event: Event, label: str) -> None:
        """Records and prints the other events of decoding."""
        if isinstance(event, Joined):
            self._enter(event)
        elif isinstance(event, Shrunk):
            memory = self._memory()
            self._remember(memory | {"smallest_batch": min(event.batch, memory.get("smallest_batch", event.batch))})
            self._warn(f"out of memory: continuing in batches of {event.batch}")
        elif isinstance(event, Failure):
            self._failed += 1
            entry = {"time": _utc(), "pass": label, "index": event.index, "reason": event.reason}
            append_line(self.folder / FAILURES, json.dumps(entry).encode() + b"\n")
            self._warn(f"{label}: image {event.index} failed: {event.reason}")
        elif isinstance(event, Died):
            self._warn(f"{event.reason}; its images go to another one")

    def _warn(self, text: str) -> None:
        _LOG.warning("%s", text)
        tqdm.write(text, file=sys.stderr)

    def _announce(self, session: Mapping[str, Any]) -> None:
        """Prints the disk space that the remaining images will take, before the first one is decoded."""
        passes = 2 if self.wants_baseline else 1
        done = sum(1 for name in ("images", "baseline")[:passes] for _ in (self.folder / name).glob("*.png"))
        left = passes * self.cfg["n"] - done
        # An image takes no more than its pixels, a record a few bytes per token.
        most = left * (3 * session["resolution"] ** 2 + 12 * session["tokens"] + 2000)
        free = shutil.disk_usage(self.folder).free
        text = (
            f"{left} images to decode: at most {format_size(most)} in {self.folder}, where {format_size(free)} are free"
        )
        if most > free:
            self._warn(f"{text}: the disk may fill up; finished images stay, and the run can be continued")
        else:
            _LOG.info("%s", text)
            _say(text)

    # --- the row ------------------------------------------------------------------------------------------------------

    def _bases(self) -> dict[str, str]:
        """Metric -> what determines its value besides the images and prompts, or why it has no value here; of the
        requested metrics and those of the row."""
        found = {}
        for name in dict.fromkeys([*self._had, *self.requested["metrics"]]):
            try:
                found[name] = metrics.metric(name, scoring_context(self.cfg)).basis()
            except metrics.Unavailable as e:
                found[name] = f"{_UNMEASURED}{e}"
        return found

    def _score(self, names: Sequence[str], method: Journal, items: Sequence[data.Item]) -> dict[str, metrics.Score]:
        """Column -> score of these metrics."""
        if not names:
            return {}
        _say(f"scoring: {', '.join(names)}")
        context = scoring_context(self.cfg, scoring_device(self.scoring_device), self.scoring_batch)
        return metrics.score(names, _Recorded(method, len(items)), items, context, metrics.Outputs(self.folder))

    def _row(
        self,
        method: Journal,
        vanilla: Journal | None,
        items: Sequence[data.Item],
        quality: Mapping[str, Any],
    ) -> dict[str, Any]:
        memory = self._memory()
        n = self.cfg["n"]
        mine = method.first(n)
        reference = mine if self.is_vanilla else vanilla.first(n) if vanilla is not None else None
        used = {record.session for record in [*mine, *(reference or [])]}
        sessions = {name: session for name, session in memory["sessions"].items() if name in used}
        if unknown := sorted(used - set(sessions)):
            raise UsageError(
                f"{self.folder}/run.json lacks the process {unknown[0]:.40} of its records; restore its entry"
            )
        last = sessions[max(sessions, key=lambda name: str(sessions[name].get("started")))]
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {name: value for name, value in self.cfg.items() if name in COLUMNS}
        row |= {name: value for name, value in last.items() if name in COLUMNS}
        row |= {"run_id": memory["run_id"], "time": _utc(), "config_hash": provenance.config_hash(self.cfg)}
        row["prompts_hash"] = data.prompts_hash(items)
        row |= summary.speed(mine) | summary.columns(mine)
        if row["perplexity"] is not None:
            row["perplexity_backend"] = _perplexity_conditions(row)
        if reference:
            row |= summary.versus(mine, reference)
            if "gamma" in self.cfg:
                row |= summary.expected_speedup(mine, reference, self.cfg["gamma"])
            row["baseline_run_id"] = memory["run_id"] + ("" if self.is_vanilla else "/baseline")
        row |= {name: value for name, value in quality.items() if name != "note"}
        remarks = _remarks(self.cfg, sessions)
        if smallest := memory.get("smallest_batch"):
            remarks.append(f"for want of memory some images were decoded in batches of {smallest}")
        if blind := sum(record.accepted_per_step is None for record in mine):
            remarks.append(
                f"{blind} of {n} images were decoded by an older specbench, which recorded nothing about their steps"
            )
        row["note"] = "; ".join(filter(None, [*remarks, quality.get("note", "")]))
        return row

    def _draw_sheet(
        self,
        row: Mapping[str, Any],
        method: Journal,
        vanilla: Journal | None,
        items: Sequence[data.Item],
    ) -> None:
        cells = []
        for item in items[: sheet.LIMIT]:
            pair = [(self.cfg["method"], method.image(item.index))]
            if vanilla is not None:
                pair.insert(0, ("vanilla", vanilla.image(item.index)))
            cells.append(sheet.SheetCell(item.prompt, pair))
        shown = "" if len(cells) == len(items) else f", first {len(cells)}"
        title = (
            f"{row['model']}: {describe(self.cfg)}, {row['accepted_length_mean']:.2f} tokens a step"
            f" ({len(items)} images{shown})"
        )
        sheet.save(self.sheet_path, title, cells)


# --- values of a row --------------------------------------------------------------------------------------------------


def scoring_context(
    cfg: Mapping[str, Any], device: str = "cpu", batch: int = metrics.ScoringContext.batch
) -> metrics.ScoringContext:
    """The scoring context of a configuration: its `metrics_dir`, `reference` and `data`."""
    folder, reference = cfg["metrics_dir"], cfg["reference"]
    return metrics.ScoringContext(
        metrics.ASSETS,
        home.expanded(folder) if folder else home.metrics_folder(),
        home.expanded(reference) if reference else None,
        cfg["data"],
        device,
        batch,
    )


def scoring_device(device: str) -> str:
    """Where the metrics' networks run for device=...; UsageError for an absent device."""
    from specbench.harness.pipeline import resolve_device

    found = str(resolve_device(device))
    return "cpu" if found == "mps" else found  # mps has no float64


def quality(scores: Mapping[str, metrics.Score]) -> dict[str, Any]:
    """The columns of a row for the scores of some metrics by column, with their notes under "note"."""
    columns: dict[str, Any] = {}
    for name, score in scores.items():
        columns |= {name: score.value, f"{name}_stderr": score.stderr, f"{name}_backend": score.backend or None}
    columns["note"] = "; ".join(f"{name}: {score.note}" for name, score in scores.items() if score.note)
    return columns


class _Log(logging.handlers.RotatingFileHandler):
    """The run's log. The operation that failed reports a full disk, once; log lines do not repeat it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _Recorded:
    """The images of the first n records, each read on demand."""

    def __init__(self, journal: Journal, n: int) -> None:
        self._journal = journal
        self.digests = [record.sha256 for record in journal.first(n)]

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._journal.image(index)


def _images_hash(journal: Journal, n: int) -> str:
    """Identifies the first n images: a hash of their pixels."""
    return sha256("".join(record.sha256 for record in journal.first(n)), 16)


def _perplexity_conditions(row: Mapping[str, Any]) -> str:
    """The conditions of a row's perplexity: "target:llamagen_scenes@1a2b3c4d, cfg_scale 3, temperature 1"."""
    digest = row["weights"].rpartition(":")[2].partition("+")[0]  # the target's; see registry.weights_label
    return f"target:{row['model']}@{digest}, cfg_scale {row['cfg_scale']:g}, temperature {row['temperature'] or 1:g}"


def _remarks(cfg: Mapping[str, Any], sessions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a reader of the row must know about how it was measured."""
    remarks = protocols.remarks(cfg)
    if cfg["batch"] > 1:
        remarks.append(f"decoded in batches of {cfg['batch']}: a latency is measured at batch 1 only")
    together = max(session.get("workers", 1) for session in sessions.values())
    if any(session.get("shared") for session in sessions.values()):
        remarks.append(
            f"decoded by {together} workers that shared a processor: no latency is measured, and the other seconds are"
            " those of one of them next to the others"
        )
    if len(sessions) > 1:
        remarks.append(f"decoded in {len(sessions)} processes: timings of several processes are mixed")
        for name in ("commit", "device_name", "torch"):
            if len({str(session.get(name)) for session in sessions.values()}) > 1:
                remarks.append(f"the processes differ in {name.replace('_', ' ')}, the last one's is given")
    return remarks


def describe(cfg: Mapping[str, Any]) -> str:
    """A method as text: "cool_sd (drafter eagle_tree, rule cool, delta 1.1)"."""
    parts = [f"drafter {cfg['drafter']}", f"rule {cfg['rule']}"]
    parts += [f"{name} {cfg[name]:g}" for name in ("window", "delta") if cfg.get(name) is not None]
    return f"{cfg['method']} ({', '.join(parts)})"


def _check_prompts(journal: Journal, items: Sequence[data.Item]) -> None:
    """Raises UsageError where an image was decoded for another prompt."""
    for item in items:
        record = journal.records.get(item.index)
        if record and (record.prompt != item.prompt or record.id not in (None, item.id)):
            raise UsageError(
                f"the prompts have changed since {journal.path} was written (index {item.index}); choose another out="
            )


def _prompts_here(cfg: Mapping[str, Any]) -> list[data.Item]:
    """The prompts as in their files now; none where they have no file, or it is gone."""
    try:
        return [] if cfg["data"] in data.DRAWN else data.load(cfg)
    except UsageError:
        return []


def _prompts_of(journal: Journal, cfg: Mapping[str, Any]) -> list[data.Item]:
    """The prompts from the records of a run, for a data set whose files are gone."""
    if cfg["data"] in data.DRAWN:
        return data.load(cfg)
    return [data.Item(r.index, r.prompt, None, r.id or str(r.index)) for r in journal.first(cfg["n"])]


def stored(folder: Path) -> dict[str, Any]:
    """The configuration of the run in a folder; parameters that were added after the run have their default values.
    UsageError where there is none that can be read."""
    path = folder / "config.yaml"
    try:
        theirs = OmegaConf.to_container(OmegaConf.load(path))
    except Exception:
        raise UsageError(f"cannot read {path}" if path.exists() else f"{folder} holds no run") from None
    if not isinstance(theirs, dict):
        raise UsageError(f"{path} is not a configuration")
    return _completed({str(name): value for name, value in theirs.items()})


def _completed(known: dict[str, Any]) -> dict[str, Any]:
    """A configuration from a folder, with the current parameters and names."""
    files = [("", "config"), *((group, str(known.get(group))) for group in parameters.PARAMETER_GROUPS)]
    defaults = {k: v for group, name in files for k, v in parameters.content(group, name).items()}
    defaults = {k: v for k, v in defaults.items() if k in parameters.TABLE}
    if "metrics_dir" not in known and isinstance(known.get("metrics"), list):  # from before the real metrics
        known["metrics"] = [provenance.RENAMED.get(str(name), name) for name in known["metrics"]]
    return {**defaults, **known, "out": None}


def _values(cfg: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={cfg[name]}" if name in cfg else f"no {name}" for name in names)


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def _patience() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns true after the first Ctrl-C; the second one interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield worker.never
        return
    requested: list[int] = []

    def note(number: int, frame: Any) -> None:
        if requested:
            raise KeyboardInterrupt
        requested.append(number)
        _say("\nfinishing the images in progress; Ctrl-C again stops at once")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(requested)
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _load_pipeline(cfg: Mapping[str, Any]) -> PromptDecoder:
    from specbench.harness.pipeline import Pipeline

    check(cfg)
    return Pipeline.load(cfg)


def _weights_here(cfg: Mapping[str, Any]) -> str | None:
    """The label in a row of the weights that exist now; None where they are absent. Loads nothing."""
    from specbench.config import registry

    try:
        return registry.weights_label(cfg)
    except OSError:
        return None


def check(cfg: Mapping[str, Any]) -> None:
    """Raises UsageError for faults that show before a model is loaded: absent weights, a bad tree, an absent device."""
    import torch

    from specbench.config import registry
    from specbench.harness.method import build_rule, check_draft
    from specbench.harness.pipeline import continuous_rule, engine_of, resolve_device

    check_draft(cfg)
    engine_of(cfg, resolve_device(cfg["device"]))
    if parameters.is_continuous("model", cfg["model"]):
        continuous_rule(cfg, 0)
    else:
        build_rule(cfg, worker.drafter(cfg).tree.height, lambda: torch.eye(2))
    registry.check_weights(cfg)


def report(run: Run, row: Mapping[str, Any]) -> str:
    """The key values of a row as text, with their standard errors over images, and the paths of the files; before them,
    whether nothing was left to do."""

    def value(name: str, unit: str = "", digits: int = 2) -> str:
        if row.get(name) is None:
            return "not measured"
        error = row.get(stderr_of(name))
        return summary.with_error(row[name], error, digits) + unit

    lines = [
        ("accepted length", value("accepted_length_mean", " tokens a step")),
        ("acceptance rate", value("acceptance_rate")),
        ("perplexity", f"{value('perplexity')}, drafts' total variation {value('draft_tv', digits=3)}"),
        ("latency", value("latency_s_mean", " s an image", 3)),
        ("throughput", value("tokens_per_s", " tokens/s", 1)),
        ("speed-up", f"{value('speedup_latency', 'x')} in latency, {value('speedup_step', 'x')} in steps"),
    ]
    for name in (column for metric in run.cfg["metrics"] for column in parameters.metric_columns(metric)):
        backend = f"  [{row[f'{name}_backend']}]" if row.get(f"{name}_backend") else ""
        lines.append((name, value(name, digits=4) + backend))
    if row.get("note"):
        lines.append(("note", str(row["note"])))
    larger = f" keeps the row over {run.larger} images; this one is only shown" if run.larger else ""
    lines += [("row", f"{run.row_path}{larger}"), ("contact sheet", str(run.sheet_path))]
    source = "/".join(filter(None, [row["data"], row["split"]]))
    head = f"{row['model']}: {describe(run.cfg)}, {source}, n={row['n']}, {row['device_name']} (± standard error)"
    printed = [head, *(f"  {name:<16} {text}" for name, text in lines)]
    if run.nothing_left:
        what = f"the first {row['n']} of {run.larger}" if run.larger else f"{row['n']} images and their row are"
        printed.insert(0, f"nothing left to do: {what} {'are ' if run.larger else ''}in {run.folder}")
    return "\n".join(printed)
