"""Running the lines of a table that have no row yet: one after the other, or several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specbench.errors import RunError, UsageError, plain
from specbench.harness import processes
from specbench.rows.csv_files import append_row, read_rows
from specbench.tables.measure import (
    ROW_FILES,
    Bench,
    EqualPanel,
    Need,
    RunPlan,
    compared_rows,
    comparisons,
    equal_file,
    equal_rows,
    store,
)

_DIED = "a process died, probably for lack of memory: use fewer --jobs; the same command goes on where it stopped"


class LineRunner:
    """Runs lines, each in its folder.

    With one job, lines run one after the other in this process. With more, so many run at a time, in processes of one
    thread each, but for those whose seconds are measured: no run may spoil another's latency.

    Args:
        title: what the lines belong to, for messages.
        home: where the folders are. folder: need -> its folder.
        keep: takes a line and its row as soon as it is there.
        number: need -> its number among how many, and its label.
    """

    def __init__(
        self,
        title: str,
        home: Path,
        bench: Bench,
        say: Callable[[str], None],
        jobs: int,
        *,
        folder: Callable[[Need], Path],
        keep: Callable[[Need, Mapping[str, Any]], None],
        number: Callable[[Need], str],
    ) -> None:
        self.title, self.home, self.bench, self.say, self.jobs = title, home, bench, say, jobs
        self.folder, self.keep, self.number = folder, keep, number

    def measure(self, some: Sequence[Need], patient: bool = False) -> None:
        """Runs lines and keeps their rows. patient: a line that fails does not stop those after it.

        Raises UsageError or RunError where lines failed; with several jobs, once the others are done.
        """
        together = [need for need in some if self.jobs > 1 and not need.alone]
        failed: dict[str, Exception] = {}
        if together:
            try:
                self._together(together, failed)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("stopped; the same command goes on where it stopped") from None
            if not patient:
                self._report(failed, len(together))
        for need in some:
            if need in together:
                continue
            self.say(f"{self._name(need)}: {need.command}")
            try:
                self._keep(need, _row(self.bench, need, self.folder(need)))
            except Exception as e:
                if not patient:
                    raise
                self._fails(need, e, failed)
        self._report(failed, len(some))

    def _together(self, some: Sequence[Need], failed: dict[str, Exception]) -> None:
        self.say(
            f"{self.title}: {len(some)} lines, {self.jobs} at a time; specbench status {self.home} shows how far they"
            " are"
        )
        with (
            processes.pool(min(self.jobs, len(some)), _DIED) as pool,
            tqdm(total=len(some), desc=self.title, unit="line") as bar,
        ):
            lines = {pool.submit(_quiet_row, self.bench, need, self.folder(need)): need for need in some}
            for future in as_completed(lines):
                need = lines[future]
                try:
                    self._keep(need, future.result())
                except BrokenProcessPool:
                    raise
                except Exception as e:
                    self._fails(need, e, failed)
                bar.update()

    def _fails(self, need: Need, error: Exception, failed: dict[str, Exception]) -> None:
        failed[self.number(need).partition(", ")[2]] = error
        known = isinstance(error, UsageError | RunError)
        self.say(f"{self._name(need)}: {plain(error if known else f'{type(error).__name__}: {error}')}")

    def _report(self, failed: Mapping[str, Exception], count: int) -> None:
        if failed:
            bad_input = all(isinstance(e, UsageError) for e in failed.values())
            raise (UsageError if bad_input else RunError)(
                f"{len(failed)} of {count} lines of {self.title} failed ({'; '.join(failed)}); the same command tries"
                " them again"
            )

    def _keep(self, need: Need, row: Mapping[str, Any]) -> None:
        if not need.identity.fits(as_text(row)):  # it would be run again by every later call
            raise UsageError(
                f"the row in {self.folder(need)} is not that of {need.command}: remove the folder and try again"
            )
        self.keep(need, row)

    def _name(self, need: Need) -> str:
        return f"{self.title}: line {self.number(need)}"


def as_text(row: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a row as text."""
    return {k: "" if v is None else str(v) for k, v in row.items()}


def collect(
    todo: RunPlan, results: Path, runs: Path, bench: Bench, say: Callable[[str], None], jobs: int = 1
) -> RunPlan:
    """Run what is missing, and compare the runs of a test image by image; returns the filled plan.

    Each row is appended as soon as it is there, and each run goes on in its own folder under `runs`/tables: whatever
    stops this function, calling it again loses and repeats nothing. jobs: as of `LineRunner`.

    Raises UsageError or RunError where lines failed; with several jobs, once the others are done.
    """
    table = todo.table
    home = runs / "tables" / ((table.matched and table.matched.lines_of) or table.id) / todo.model
    needs = {need.line.key: need for need in todo.needs}
    done: set[str] = set()  # the keys of the lines that this call has run

    def folder(need: Need) -> Path:
        """Its own, or that of the table whose run its row is."""
        own = home / need.folder
        if need.row is None or own.exists():
            return own
        shared = (runs / "tables").glob(f"*/{todo.model}/*-{need.key}")
        return next((path for path in sorted(shared) if _is_of(path, need.row)), own)

    def keep(need: Need, row: Mapping[str, Any]) -> None:
        append = append_row if need.rows_of == "run" else ROW_FILES[need.rows_of].append
        append(store(table, results), row)
        needs[need.line.key] = replace(need, row=as_text(row))
        done.add(need.line.key)

    def number(need: Need) -> str:
        return f"{list(needs).index(need.line.key) + 1} of {len(needs)}, {need.line.label}"

    def now() -> RunPlan:
        return replace(todo, needs=tuple(needs.values()), pairs=equal_rows(table, results))

    def measured_again(keys: Iterable[str]) -> None:
        """The images of a row that came without them are decoded again."""
        some = [needs[key] for key in dict.fromkeys(keys) if key not in done]
        runner.measure([need for need in some if not _is_of(folder(need), need.row)])

    runner = LineRunner(table.id, home, bench, say, jobs, folder=folder, keep=keep, number=number)
    # The curves of a panel are tested before another panel begins: what is stopped keeps its tests.
    for panel in (*todo.tested_panels, None):
        own = needs if panel is None else {key for curve in panel.curves for key in curve.lines}
        runner.measure([need for need in now().missing if need.line.key in own])
        measured_again(key for one in now().unequalled for curve in one.panel.curves for key in curve.lines)
        for one in now().unequalled:
            _equal(one, needs, folder, equal_file(table, results), bench, say)
    pairs = list(dict.fromkeys((test.other, test.line) for test in now().untested))
    measured_again(key for pair in pairs for key in pair)
    if pairs:
        from specbench.compare import wording
    for a, b in pairs:
        say(f"{table.id}: {needs[b].line.label} and {needs[a].line.label}, image by image")
        for row in bench.compare(folder(needs[a]), folder(needs[b])):
            wording.ROWS.append(comparisons(table, results), row)
    return replace(now(), compared=compared_rows(table, results))


def _equal(
    one: EqualPanel,
    needs: Mapping[str, Need],
    folder: Callable[[Need], Path],
    file: Path,
    bench: Bench,
    say: Callable[[str], None],
) -> None:
    """Test every pair of curves of a panel, and keep the rows. Curves whose runs lack the column are left out."""
    from specbench.compare import equal

    label = one.panel.label
    say(f"{label}: every pair of curves, image by image")
    curves = {curve.label: [needs[key] for key in curve.lines] for curve in one.panel.curves}
    for x, value in one.matched.at[label]:
        for y in one.matched.tested:
            measured = {name: some for name, some in curves.items() if all((need.row or {}).get(y) for need in some)}
            if left_out := [name for name in curves if name not in measured]:
                say(f"{label}: {', '.join(left_out)} did not measure {y}, and is not compared")
            folders = {name: [folder(need) for need in some] for name, some in measured.items()}
            for row in bench.equal(folders, x, value, y):
                equal.ROWS.append(file, {**row, "panel": label, "runs": one.runs})


def _is_of(folder: Path, row: Mapping[str, Any] | None) -> bool:
    """Whether a row is of the completed run in a folder."""
    file = folder / "row.csv"
    return row is not None and file.exists() and any(one["run_id"] == row.get("run_id") for one in read_rows(file))


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
