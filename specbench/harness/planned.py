"""Planned runs, such as the runs of a grid, a suite or a table, started or not, and their execution."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.errors import RunError, UsageError, plain
from specbench.rows import provenance
from specbench.rows.columns import Cells, Row
from specbench.rows.csv_files import as_cells
from specbench.rows.remark import remarks_of
from specbench.storage.files import sha256

if TYPE_CHECKING:
    from specbench.harness.status import Status

Work = Callable[[Any], Row]  # a run -> its row
#: What `PlannedRun.needs` may contain: seconds, if the run measures them; the emitted divergence, if it computes it.
SECONDS, EMITTED = "timing", "emitted_kl"
_DIED = "a process died, probably because memory ran out: use fewer --jobs; the same command continues where it stopped"


@dataclass(frozen=True)
class PlannedRun:
    """A planned run: its configuration, its folder, and its row if one exists.

    key, label: of its line in a table. overrides: the arguments that compose the configuration. rows_of: the command
    that makes its row, `run`, `bench` or `probe`. weights: the label of the weights that it would load now; None: not
    known before they are loaded. needs: what its row must have. row: its cells as text. asked: whether its
    metrics were requested by name.
    """

    folder: Path
    config: RunConfig
    key: str = ""
    label: str = ""
    overrides: tuple[str, ...] = ()
    rows_of: str = "run"
    weights: str | None = None
    needs: tuple[str, ...] = ()
    row: Cells | None = None
    asked: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return self.label

    @property
    def command(self) -> str:
        """The command line that starts the run."""
        more = ["bench.images=0"] if self.rows_of == "bench" else []
        return f"specbench {self.rows_of}{parameters.including_flags()} {shlex.join([*self.overrides, *more])}"

    @cached_property
    def config_hash(self) -> str:
        return provenance.config_hash(self.config)

    @property
    def timed(self) -> bool:
        """Whether it measures seconds, which other processes would disturb."""
        from specbench.rows import timing

        return self.rows_of == "bench" or (self.rows_of == "run" and timing.is_timed(self.config))

    @property
    def hashes(self) -> tuple[str, ...]:
        """The configuration hashes of the rows that can belong to this run."""
        return (self.config_hash,)

    def fits(self, row: Cells) -> bool:
        """Whether `row` belongs to this run and has everything that `needs` names."""
        same = row.get("config_hash") in self.hashes and self.weights in (None, row.get("weights"))
        return same and not any(self._is_missing(row, name) for name in self.needs)

    def _is_missing(self, row: Cells, name: str) -> bool:
        if name == SECONDS:
            return self.timed and row.get(name) == "false"
        known = row.get(name) or any(remark.column == name for remark in remarks_of(row))
        return bool(self.config.emitted_draws) and not known

    def with_newest(self, rows: Sequence[Cells]) -> Self:
        """This run with the last of these rows that fits."""
        return replace(self, row=next((row for row in reversed(rows) if self.fits(row)), None))

    def status(self) -> Status:
        """The progress of the run, read from its folder; "not started" if the folder holds no readable run."""
        from specbench.harness import status

        if (self.folder / "config.yaml").is_file():
            with suppress(UsageError):
                return status.of_run(self.folder)
        return status.not_started(self.folder, self.config)


def digest(config: RunConfig, weights: str | None) -> str:
    """A digest of a configuration and its weights, for the name of a folder."""
    return sha256(f"{provenance.config_hash(config)} {weights}", 8)


R = TypeVar("R", bound=PlannedRun)


@dataclass(frozen=True)
class Plan(Generic[R]):
    """Planned runs. title: what they belong to, for messages; home: the folder that contains their folders."""

    title: str
    home: Path
    runs: tuple[R, ...]

    @property
    def missing(self) -> list[R]:
        """The runs without a row."""
        return [run for run in self.runs if run.row is None]

    def with_rows(self, rows: Mapping[Path, Cells]) -> Self:
        """This plan with these rows, by the folders of their runs."""
        return replace(self, runs=tuple(replace(run, row=rows.get(run.folder, run.row)) for run in self.runs))


def execute(
    plan: Plan[R],
    chosen: Sequence[R],
    work: Work,
    keep: Callable[[R, Row], None],
    say: Callable[[str], None],
    jobs: int = 1,
) -> None:
    """Executes some runs of a plan with `work`, and passes each row to `keep` as soon as it exists.

    With one job, the runs are executed one after another in this process. With several jobs, that many run at a time,
    in processes of one thread each. Runs that measure seconds always run alone, so that no run changes another's
    latency. A failed run does not stop the runs after it.

    Raises UsageError or RunError if runs failed, after the others are done.
    """
    labels = {run.folder: f"{plan.title}: run {i} of {len(plan.runs)}" for i, run in enumerate(plan.runs, 1)}
    failed: dict[str, Exception] = {}

    def finish(run: R, row: Callable[[], Row]) -> None:
        try:
            made = row()
            if not run.fits(as_cells(made)):  # every later call would run it again
                raise UsageError(
                    f"the row in {run.folder} does not belong to {run.command}: remove the folder and try again"
                )
            keep(run, made)
        except Exception as e:
            failed[run.name] = e
            known = isinstance(e, UsageError | RunError)
            say(f"{labels[run.folder]}, {run.name}: {plain(e if known else f'{type(e).__name__}: {e}')}")

    together = [run for run in chosen if jobs > 1 and not run.timed]
    if together:
        side_by_side = f"{plan.title}: {len(together)} runs, {jobs} at a time"
        say(f"{side_by_side}; specbench status {plan.home} shows their progress")
        _together(plan.title, together, work, finish, jobs)
    for run in chosen:
        if jobs == 1 or run.timed:
            say(f"{labels[run.folder]}, {run.name}: {run.command}")
            finish(run, partial(work, run))
    _report(plan.title, failed, len(chosen))


def _together(
    title: str,
    runs: Sequence[R],
    work: Work,
    finish: Callable[[R, Callable[[], Row]], None],
    jobs: int,
) -> None:
    from concurrent.futures import as_completed
    from concurrent.futures.process import BrokenProcessPool

    from tqdm import tqdm

    from specbench.harness import processes

    try:
        with (
            processes.pool(min(jobs, len(runs)), RunError(_DIED)) as pool,
            tqdm(total=len(runs), desc=title, unit="run") as bar,
        ):
            started = {pool.submit(_quietly, work, run): run for run in runs}
            for future in as_completed(started):
                if isinstance(error := future.exception(), BrokenProcessPool):
                    raise error
                finish(started[future], future.result)
                bar.update()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command continues where it stopped") from None


def _quietly(work: Work, run: R) -> Row:
    """Executes a run in a separate process, without progress on the screen. The log is in the run's folder."""
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        try:
            return work(run)
        except (UsageError, RunError):
            raise
        except Exception as e:  # the other process may not be able to unpickle it
            raise RunError(f"{type(e).__name__}: {e}") from None


def _report(title: str, failed: Mapping[str, Exception], count: int) -> None:
    if failed:
        bad_input = all(isinstance(e, UsageError) for e in failed.values())
        raise (UsageError if bad_input else RunError)(
            f"{len(failed)} of {count} runs of {title} failed ({'; '.join(failed)}); the same command tries them again"
        )
