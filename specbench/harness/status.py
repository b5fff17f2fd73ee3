"""The progress of a run, read from its folder without changing it, even while it is running."""

from __future__ import annotations

import fcntl
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specbench.config import indices
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.harness.folder import DecodingFailure, RunFolder, stored
from specbench.rows import remark_text, timing
from specbench.rows.csv_files import read_rows
from specbench.rows.degenerate import of_records
from specbench.rows.journal import Record, read_records
from specbench.rows.provenance import config_hash
from specbench.rows.scores import images_fingerprint

_RECENT = 200  # the speed is computed over this many images


@dataclass(frozen=True)
class PassProgress:
    """One pass over the prompts: finished and remaining images, and images per second since the latest start (None
    before the second image)."""

    done: int
    left: int
    per_s: float | None


@dataclass(frozen=True)
class Status:
    """The state of a run. n: prompts; state: running, finished, stopped or not started; time_left_s: None if an
    unfinished pass has no speed yet; failures: of images that are still missing; degenerate: problems of the finished
    images."""

    folder: str
    state: str
    method: str
    model: str
    n: int
    images: PassProgress
    baseline: PassProgress | None
    time_left_s: float | None
    failures: list[DecodingFailure]
    degenerate: list[str]
    bytes: int

    def plain(self) -> dict[str, object]:
        """The values of `specbench status --json`."""
        return asdict(self) | {"failures": [failure.plain() for failure in self.failures]}


def of_run(path: Path) -> Status:
    """The state of the run in a folder. UsageError if the folder holds no readable run."""
    cfg, folder = stored(path), RunFolder(path)
    started, wanted = folder.metadata().begun, indices.of_run(cfg)
    method, vanilla = _records(folder.records), _records(folder.baseline_records)
    images = _pass(method, wanted, started)
    baseline = _pass(vanilla, wanted, started) if cfg.wants_baseline else None
    passes = [p for p in (images, baseline) if p is not None and p.left]
    done = not passes and _has_row(folder, cfg, [method[i] for i in wanted])
    state = "running" if _locked(folder.lock) else "finished" if done else "stopped"
    times = [p.left / p.per_s if p.per_s else None for p in passes]
    # If the passes alternate, the time of each includes the other's.
    together = max if timing.is_timed(cfg) else sum
    return Status(
        str(path),
        state,
        cfg.method,
        cfg.model,
        cfg.n,
        images,
        baseline,
        None if None in times else together([0.0, *(time for time in times if time)]),
        _failures(folder, {cfg.method: method, "vanilla": vanilla}) if passes else [],
        [remark_text.text(finding.remark) for finding in of_records([method[i] for i in wanted if i in method])],
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
    )


def not_started(path: Path, cfg: RunConfig) -> Status:
    """The state of a run in a suite or a grid that has no folder yet."""
    left = PassProgress(0, cfg.images, None)
    baseline = left if cfg.wants_baseline else None
    return Status(str(path), "not started", cfg.method, cfg.model, cfg.n, left, baseline, None, [], [], 0)


def _records(path: Path) -> dict[int, Record]:
    return {record.index: record for record in read_records(path)} if path.is_file() else {}


def _pass(records: Mapping[int, Record], wanted: Sequence[int], started: float | None) -> PassProgress:
    done = len(records.keys() & set(wanted))
    times = sorted((r.done, r.batch) for r in records.values() if started is not None and r.done >= started)
    recent = times[-_RECENT:]
    batch = recent[0][1] if recent else 0  # the images of the first batch: the span does not contain their time
    span = recent[-1][0] - recent[0][0] if recent else 0.0
    return PassProgress(
        done, len(wanted) - done, (len(recent) - batch) / span if span > 0 and len(recent) > batch else None
    )


def _locked(path: Path) -> bool:
    """Whether a process has a run's lock."""
    try:
        with path.open("rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _has_row(folder: RunFolder, config: RunConfig, records: Sequence[Record]) -> bool:
    """Whether the run has the row of its latest request, and all metrics were tried on the images of these records."""
    try:
        hashes = [row["config_hash"] for row in read_rows(folder.row)] if folder.row.is_file() else []
    except UsageError:  # the same command replaces the file
        hashes = []
    if hashes != [config_hash(config)]:
        return False
    images = images_fingerprint(r.sha256 for r in records)
    tried = {line.metric for line in folder.open_scores() if line.images == images}
    return tried.issuperset(config.metrics)


def _failures(folder: RunFolder, records: Mapping[str, Mapping[int, Record]]) -> list[DecodingFailure]:
    """The last failure of each missing image; records: of each pass, by its label."""
    last = {(failure.label, failure.index): failure for failure in folder.read_failures()}
    return [failure for (label, index), failure in last.items() if label in records and index not in records[label]]


def summary(folder: Path, runs: Sequence[Status]) -> str:
    """One line on all runs of a suite or of a grid."""
    states = Counter(run.state for run in runs)
    parts = [f"{states[name]} {name}" for name in ("finished", "running", "stopped", "not started") if states[name]]
    passes = [progress for run in runs for progress in (run.images, run.baseline) if progress is not None]
    done, count = sum(progress.done for progress in passes), sum(progress.done + progress.left for progress in passes)
    more = "" if states["finished"] == len(runs) else f"; continue with specbench resume {shlex.quote(str(folder))}"
    return f"{folder}: {len(runs)} runs, {', '.join(parts)}; {done} of {count} images{more}"
