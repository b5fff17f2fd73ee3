"""Running the lines of a table that have no row yet: one after the other, or several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specbench.errors import RunError, UsageError, plain
from specbench.harness import processes
from specbench.rows.csv_files import append_row
from specbench.tables.measure import ROW_FILES, Bench, Need, RunPlan, compared_rows, comparisons, store

_DIED = "a process died, probably for lack of memory: use fewer --jobs; the same command goes on where it stopped"


def collect(
    todo: RunPlan, results: Path, runs: Path, bench: Bench, say: Callable[[str], None], jobs: int = 1
) -> RunPlan:
    """Run what is missing, and compare the runs of a test image by image; returns the filled plan.

    With one job, lines run one after the other in this process. With more, so many run at a time, in processes of one
    thread each, but for those whose seconds are measured: no run may spoil another's latency. Each row is appended as
    soon as it is there, and each run goes on in its own folder under `runs`/tables: whatever stops this function,
    calling it again loses and repeats nothing.

    Raises UsageError or RunError where lines failed; with several jobs, once the others are done.
    """
    own = _Collection(todo, results, runs, bench, say, jobs)
    own.measure(todo.missing)
    tests = replace(todo, needs=tuple(own.needs.values())).untested
    pairs = list(dict.fromkeys((test.other, test.line) for test in tests))
    # the images of a row that came without them are decoded again
    own.measure([own.needs[key] for key in dict.fromkeys(key for pair in pairs for key in pair) if key not in own.done])
    for pair in pairs:
        own.compare(*(own.needs[key] for key in pair))
    return RunPlan(todo.table, todo.model, tuple(own.needs.values()), compared_rows(todo.table, results))


class _Collection:
    """The work of `collect`. needs: every line by its key, with the rows that there are; done: the keys of the lines
    that this call has run."""

    def __init__(
        self, todo: RunPlan, results: Path, runs: Path, bench: Bench, say: Callable[[str], None], jobs: int
    ) -> None:
        self.table, self.results, self.bench, self.say, self.jobs = todo.table, results, bench, say, jobs
        self.home = runs / "tables" / todo.table.id / todo.model
        self.needs = {need.line.key: need for need in todo.needs}
        self.done: set[str] = set()

    def measure(self, some: Sequence[Need]) -> None:
        """Run lines, and keep their rows."""
        together = [need for need in some if self.jobs > 1 and not need.alone]
        if together:
            try:
                self._together(together)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("stopped; the same command goes on where it stopped") from None
        for need in some:
            if need not in together:
                self.say(f"{self._name(need)}: {need.command}")
                self._keep(need, _row(self.bench, need, self._folder(need)))

    def compare(self, other: Need, one: Need) -> None:
        """Keep the comparison of two lines, which have run in their folders."""
        from specbench.compare import wording

        self.say(f"{self.table.id}: {one.line.label} and {other.line.label}, image by image")
        for row in self.bench.compare(self._folder(other), self._folder(one)):
            wording.ROWS.append(comparisons(self.table, self.results), row)

    def _together(self, some: Sequence[Need]) -> None:
        self.say(
            f"{self.table.id}: {len(some)} lines, {self.jobs} at a time; specbench status {self.home} shows how far"
            " they are"
        )
        failed: dict[str, Exception] = {}
        with (
            processes.pool(min(self.jobs, len(some)), _DIED) as pool,
            tqdm(total=len(some), desc=self.table.id, unit="line") as bar,
        ):
            lines = {pool.submit(_quiet_row, self.bench, need, self._folder(need)): need for need in some}
            for future in as_completed(lines):
                need = lines[future]
                try:
                    self._keep(need, future.result())
                except BrokenProcessPool:
                    raise
                except Exception as e:
                    failed[need.line.label] = e
                    self.say(f"{self._name(need)}: {plain(e)}")
                bar.update()
        if failed:
            bad_input = all(isinstance(e, UsageError) for e in failed.values())
            raise (UsageError if bad_input else RunError)(
                f"{len(failed)} of {len(some)} lines of {self.table.id} failed ({'; '.join(failed)}); the same command"
                " tries them again"
            )

    def _keep(self, need: Need, row: Mapping[str, Any]) -> None:
        text = {k: "" if v is None else str(v) for k, v in row.items()}
        if not need.identity.fits(text):  # it would be run again by every later call
            raise UsageError(
                f"the row in {self._folder(need)} is not that of {need.command}: remove the folder and try again"
            )
        append = append_row if need.rows_of == "run" else ROW_FILES[need.rows_of].append
        append(store(self.table, self.results), row)
        self.needs[need.line.key] = replace(need, row=text)
        self.done.add(need.line.key)

    def _folder(self, need: Need) -> Path:
        return self.home / need.folder

    def _name(self, need: Need) -> str:
        number = list(self.needs).index(need.line.key) + 1
        return f"{self.table.id}: line {number} of {len(self.needs)}, {need.line.label}"


def _row(bench: Bench, need: Need, folder: Path) -> Mapping[str, Any]:
    return bench.run(need.overrides, folder) if need.rows_of == "run" else bench.row_of(need.rows_of, need.overrides)


def _quiet_row(bench: Bench, need: Need, folder: Path) -> Mapping[str, Any]:
    """In a process of its own, without progress on the screen: a run has a log in its folder."""
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        try:
            return _row(bench, need, folder)
        except (UsageError, RunError):
            raise
        except Exception as e:  # which the other process may not be able to read
            raise RunError(f"{type(e).__name__}: {e}") from None
