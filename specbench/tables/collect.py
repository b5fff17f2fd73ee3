"""Runs the lines of a table that have no row yet, and compares runs for its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from specbench.harness.planned import Plan, PlannedRun, Row, execute
from specbench.rows.csv_files import append_row, as_cells, read_rows
from specbench.storage.csv_text import csv_text
from specbench.storage.files import write_atomically
from specbench.tables.definitions import Panel
from specbench.tables.measure import ROW_FILES, TablePlan, store

P = TypeVar("P", bound=Plan[Any])


class Bench:
    """Makes rows and compares runs. Tests replace it."""

    def row(self, run: PlannedRun) -> Mapping[str, Any]:
        """The row of a planned run, which `specbench run` starts or continues in its folder."""
        if run.rows_of == "probe":
            from specbench.bench import rows

            return rows.probe(run.config)
        if run.rows_of == "bench":
            from specbench.bench import measure, rows

            return rows.row(run.config, measure.measure(run.config, measure.BenchPlan(images=0)))
        from specbench.harness.run import run as run_it

        return run_it(run.config, run.folder).row

    def compare(self, a: Path, b: Path) -> Sequence[Mapping[str, Any]]:
        """The rows of `specbench compare` for two folders of runs."""
        from specbench.compare import comparison, passes, wording

        return wording.rows(comparison.compare(passes.read(str(a)), passes.read(str(b))))

    def equal(self, curves: Mapping[str, Sequence[Path]], x: str, y: str) -> Sequence[Mapping[str, Any]]:
        """The rows of `compare.equal` for every pair of curves at equal x; curves: label -> folders of runs."""
        from specbench.compare import equal, passes

        scored = {label: [passes.read(str(path)) for path in paths] for label, paths in curves.items()}
        return list(equal.rows(scored, x, y))


class PlanRunner(Generic[P]):
    """Executes runs of a plan, reports progress to `say`, and compares their images. made: folder -> row of the
    executed runs; keep, jobs, patient: see `planned.execute`."""

    def __init__(
        self,
        plan: P,
        bench: Bench,
        say: Callable[[str], None],
        jobs: int = 1,
        keep: Callable[[PlannedRun, Mapping[str, Any]], None] = lambda run, row: None,
        patient: bool = False,
    ) -> None:
        self.plan, self.bench, self.say, self.jobs, self.keep, self.patient = plan, bench, say, jobs, keep, patient
        self.made: dict[Path, Row] = {}

    def execute(self, chosen: Sequence[PlannedRun]) -> None:
        """Executes these runs and adds their rows to the plan. UsageError or RunError if some failed."""

        def keep(run: PlannedRun, row: Mapping[str, Any]) -> None:
            self.keep(run, row)
            self.made[run.folder] = as_cells(row)

        try:
            execute(self.plan, chosen, self.bench.row, keep, self.say, self.jobs, self.patient)
        finally:
            self.plan = self.plan.with_rows(self.made)

    def compare(self, a: tuple[str, Path], b: tuple[str, Path]) -> list[Row]:
        """The rows of `specbench compare` for two runs, each given by its label and its folder."""
        from specbench.compare import wording

        self.say(f"{self.plan.title}: {b[0]} and {a[0]}, image by image")
        rows = self.bench.compare(a[1], b[1])
        return [as_cells({name: row.get(name) for name in wording.ROWS.columns}) for row in rows]


class _TableRunner(PlanRunner[TablePlan]):
    """Executes the runs of a table and appends each row to the table's file as soon as it exists."""

    def __init__(self, plan: TablePlan, results: Path, bench: Bench, say: Callable[[str], None], jobs: int) -> None:
        super().__init__(plan, bench, say, jobs, self._append)
        self.results = results

    def _append(self, run: PlannedRun, row: Mapping[str, Any]) -> None:
        append = append_row if run.rows_of == "run" else ROW_FILES[run.rows_of].append
        append(store(self.plan.table, self.results), row)

    def folders(self, keys: Iterable[str]) -> dict[str, Path]:
        """Line key -> the folder with the images of its row. If a row came without images, they are decoded again."""
        every = {run.key: run for run in self.plan.runs}
        runs = [every[key] for key in dict.fromkeys(keys)]
        self.execute([run for run in runs if self._folder(run) is None])
        return {run.key: self._folder(run) or run.folder for run in runs}

    def _folder(self, run: PlannedRun) -> Path | None:
        """The run's own folder, or the folder of another table's run with this row; None if both are missing."""
        if run.folder in self.made:
            return run.folder
        shared = run.folder.parents[2].glob(f"*/{self.plan.model}/*-{run.folder.name.rpartition('-')[2]}")
        places = [run.folder] if run.folder.exists() else sorted(shared)
        return next((place for place in places if _is_of(place, run.row)), None)

    def test_curves(self, panel: Panel, runs: str) -> None:
        """Compares the pairs of curves of a panel that are not compared yet. runs: identifies the panel's runs."""
        from specbench.compare import equal

        label, folders, plan = panel.label, self.folders(panel.keys), self.plan.with_tests(self.results)
        self.say(f"{label}: every pair of curves, image by image")
        for (x, y), missing in plan.uncompared(panel, runs).items():
            if not missing:
                continue
            whole = plan.with_column(panel, y)
            if left_out := [curve.label for curve in panel.curves if curve not in whole]:
                self.say(f"{label}: {', '.join(left_out)} did not measure {y} and is skipped")
            curves = {curve.label: [folders[key] for key in curve.lines] for curve in whole}
            for row in self.bench.equal(curves, x, y):
                if (row["a"], row["b"]) in missing:
                    equal.ROWS.append(store(plan.table, self.results, "_pairs"), {**row, "panel": label, "runs": runs})


def collect(todo: TablePlan, results: Path, bench: Bench, say: Callable[[str], None], jobs: int = 1) -> TablePlan:
    """Executes the runs without a row, compares the runs of each test image by image, and returns the filled plan.

    Each row is appended as soon as it exists, and each run continues in its own folder. After any interruption, another
    call loses and repeats nothing. jobs: see `planned.execute`.

    Raises UsageError or RunError if lines failed; with several jobs, after the others are done.
    """
    from specbench.compare import wording

    collector = _TableRunner(todo, results, bench, say, jobs)
    # The curves of a panel are tested before the next panel starts, so that an interruption keeps their tests.
    for panel in todo.table.compared_panels:
        collector.execute([run for run in collector.plan.missing if run.key in panel.keys])
        for compared in collector.plan.with_tests(results).unequalled.values():
            collector.folders(compared.keys)  # which may change their runs
        for runs, compared in collector.plan.with_tests(results).unequalled.items():
            collector.test_curves(compared, runs)
    collector.execute(collector.plan.missing)
    tests = collector.plan.untested
    folders = collector.folders(key for test in tests for key in (test.other, test.line))
    labels = {line.key: line.label for line in todo.table.lines}
    for a, b in dict.fromkeys((test.other, test.line) for test in tests):
        for row in collector.compare((labels[a], folders[a]), (labels[b], folders[b])):
            wording.ROWS.append(store(todo.table, results, "_test"), row)
    tested = collector.plan.with_tests(results)
    if tests:
        text = csv_text(wording.ROWS.columns, tested.compared)
        write_atomically(store(todo.table, results, "_test"), text.encode())
    return tested


def _is_of(folder: Path, row: Row | None) -> bool:
    """Whether a row belongs to the finished run in a folder."""
    file = folder / "row.csv"
    return row is not None and file.exists() and any(r["run_id"] == row.get("run_id") for r in read_rows(file))
