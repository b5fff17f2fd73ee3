"""Executes the runs of a plan that have no row yet, and compares runs: for its tests, with vanilla AR, and curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from specbench.errors import RunError, UsageError
from specbench.harness.planned import PlannedRun, execute
from specbench.rows.columns import Cells, Row
from specbench.rows.csv_files import as_cells, to_csv
from specbench.storage.csv_text import csv_text
from specbench.storage.files import write_atomically
from specbench.tables.definitions import Panel
from specbench.tables.table_runs import SUITE_ROWS, Group, TablePlan, TableRun


class Bench:
    """Makes rows and compares runs. Tests replace it."""

    def row(self, run: PlannedRun) -> Row:
        """The row of a planned run, which `specbench run` starts or continues in its folder."""
        if run.rows_of == "probe":
            from specbench.bench import benchmark_rows

            return benchmark_rows.probe(run.config)
        if run.rows_of == "bench":
            from specbench.bench import benchmark, benchmark_rows

            return benchmark_rows.row(run.config, benchmark.measure(run.config, benchmark.BenchPlan(images=0)))
        from specbench.harness.run import run as run_it

        return run_it(run.config, run.folder).row

    def compare(self, a: Path, b: Path) -> Sequence[Row]:
        """The rows of `specbench compare` for two folders of runs."""
        from specbench.compare import comparison, passes, wording

        return wording.rows(comparison.compare(passes.read(str(a)), passes.read(str(b))))

    def over_seeds(self, pairs: Sequence[tuple[Path, Path]]) -> Sequence[Row]:
        """The same for the means over seeds, from the two folders of each seed."""
        from specbench.compare import comparison, passes, wording

        scored = [(passes.read(str(a)), passes.read(str(b))) for a, b in pairs]
        return wording.rows(comparison.over_seeds(scored))

    def equal(self, curves: Mapping[str, Sequence[Path]], x: str, y: str) -> Sequence[Row]:
        """The rows of `compare.equal` for every pair of curves at equal x; curves: label -> folders of runs."""
        from specbench.compare import equal, passes

        scored = {label: [passes.read(str(path)) for path in paths] for label, paths in curves.items()}
        return list(equal.rows(scored, x, y))


def collect(
    todo: TablePlan, bench: Bench, say: Callable[[str], None], jobs: int = 1, no_run: bool = False
) -> TablePlan:
    """Executes the runs without a row, compares runs image by image, and returns the filled plan. jobs: see
    `planned.execute`; no_run: only compares.

    Each row is stored as soon as it exists, and each run continues in its own folder. After any interruption, another
    call loses and repeats nothing.

    A failed run does not stop the others: the plan has the error.
    """
    runner = _Runner(todo, bench, say, jobs)
    runner.pair_curves()
    of_panels = {key for panel in runner.plan.table.compared_panels for key in panel.keys}
    runner.attempt([] if no_run else [run for run in runner.plan.missing if run.key not in of_panels])
    if todo.suite.baseline:
        runner.plan = against_vanilla(runner.plan)
    runner.compare()
    if runner.plan.suite.baseline and (rows := [run.row for run in runner.plan.runs if run.row is not None]):
        write_atomically(todo.home / SUITE_ROWS, to_csv(rows).encode())
    return runner.plan


def against_vanilla(plan: TablePlan) -> TablePlan:
    """The plan with the columns of finished runs that compare them with the vanilla AR of their suite."""
    from specbench.harness.row import against

    rows = {run.folder: run.row for run in plan.runs if run.row is not None}
    for run in plan.runs:
        if run.row is not None and not run.seconds and run.reference in rows:
            n = min(int(float(row["n"])) for row in (run.row, rows[run.reference]))  # a line may have its own
            versus = against(run.folder, run.reference, n)
            rows[run.folder] = {**run.row, **as_cells(versus)}
    return plan.with_rows(rows)


class _Runner:
    """Executes runs of a plan, reports progress to `say`, and compares their images. made: the folders of
    executed runs; jobs: see `planned.execute`."""

    def __init__(self, plan: TablePlan, bench: Bench, say: Callable[[str], None], jobs: int) -> None:
        self.plan, self.bench, self.say, self.jobs = plan, bench, say, jobs
        self.made: set[Path] = set()

    def execute(self, chosen: Sequence[TableRun]) -> None:
        """Executes these runs, stores their rows and adds them to the plan. UsageError or RunError if some failed."""

        def keep(run: PlannedRun, row: Row) -> None:
            self.plan.keep(run, row)
            self.made.add(run.folder)
            self.plan = self.plan.with_rows({run.folder: as_cells(row)})

        execute(self.plan, chosen, self.bench.row, keep, self.say, self.jobs)

    def attempt(self, chosen: Sequence[TableRun]) -> None:
        """`execute`, after which the plan has the error if some failed."""
        try:
            self.execute(chosen)
        except (UsageError, RunError) as e:
            self.plan = replace(self.plan, failed=self.plan.failed or e)

    def folders(self, runs: Iterable[TableRun]) -> list[Path]:
        """The folders with the images of these runs' rows. If a row came without images, they are decoded again."""
        every = list(runs)
        self.execute([run for run in {run.folder: run for run in every}.values() if self._folder(run) is None])
        return [self._folder(run) or run.folder for run in every]

    def _folder(self, run: TableRun) -> Path | None:
        return run.folder if run.folder in self.made else self.plan.with_images(run)

    def compare(self) -> None:
        """Compares the runs that are not compared yet, or that were executed since, and writes the rows."""
        from specbench.compare import wording

        if not self.plan.comparisons():
            return
        file, is_suite, problems = self.plan.file("_test"), bool(self.plan.suite.baseline), dict[str, None]()

        def stored(rows: Sequence[Cells]) -> None:
            self.plan = replace(self.plan, compared=tuple(self.plan.adjusted(rows)))
            if rows:
                write_atomically(file, csv_text(wording.ROWS.columns, self.plan.compared).encode())

        if is_suite:
            with suppress(UsageError):  # computed again
                self.plan = replace(self.plan, compared=tuple(wording.ROWS.read(file)))
        while any(self._folder(run) is None for run in self._uncompared_runs()):
            self.folders(self._uncompared_runs())  # which may change other comparisons, too
        for group in self._uncompared():
            outdated = self.plan.compared_rows(group)
            try:
                rows = self._compared(group)
                stored([*(row for row in self.plan.compared if row not in outdated), *rows])
            except UsageError as e:
                if not is_suite:
                    raise
                problems[str(e)] = None
        if is_suite:  # without the runs of earlier definitions
            stored([row for group in self.plan.comparisons() for row in self.plan.compared_rows(group)])
        self.plan = replace(self.plan, uncompared=tuple(problems))

    def _uncompared(self) -> list[Group]:
        untested = {(test.other, test.line) for test in self.plan.untested if not self.plan.suite.baseline}

        def is_missing(group: Group) -> bool:
            ran = any(run.folder in self.made for pair in group for run in pair)
            return (
                ran or not self.plan.compared_rows(group) or not untested.isdisjoint((a.key, b.key) for a, b in group)
            )

        return [group for group in self.plan.comparisons() if is_missing(group)]

    def _uncompared_runs(self) -> list[TableRun]:
        return [run for group in self._uncompared() for pair in group for run in pair]

    def _compared(self, group: Group) -> list[Cells]:
        """The rows of the comparison of a group."""
        from specbench.compare import wording

        pairs = [(a, b) for a, b in (self.folders(pair) for pair in group)]
        if len(group) > 1:
            rows = self.bench.over_seeds(pairs)
        else:
            [(a, b)] = group
            self.say(f"{self.plan.title}: {b.label} and {a.label}, image by image")
            rows = self.bench.compare(*pairs[0])
        return [as_cells({name: row.get(name) for name in wording.ROWS.columns}) for row in rows]

    def pair_curves(self) -> None:
        """Executes the runs of each panel whose curves are compared, and compares them, before the next panel starts,
        so that an interruption keeps its comparisons."""
        for panel in self.plan.table.compared_panels:
            self.attempt([run for run in self.plan.missing if run.key in panel.keys])
            for compared in self.plan.unequalled.values():
                self.folders(self._of_panel(compared))  # which may change their runs
            for runs, compared in self.plan.unequalled.items():
                self._pair(compared, runs)

    def _of_panel(self, panel: Panel) -> list[TableRun]:
        runs = {run.key: run for run in self.plan.runs}
        return [runs[key] for key in panel.keys]

    def _pair(self, panel: Panel, runs: str) -> None:
        """Compares the pairs of curves of a panel that are not compared yet. runs: identifies the panel's runs."""
        from specbench.compare import equal

        label, folders = panel.label, dict(zip(panel.keys, self.folders(self._of_panel(panel)), strict=True))
        self.say(f"{label}: every pair of curves, image by image")
        for (x, y), missing in self.plan.unpaired(panel, runs).items():
            if not missing:
                continue
            whole = self.plan.with_column(panel, y)
            if left_out := [curve.label for curve in panel.curves if curve not in whole]:
                self.say(f"{label}: {', '.join(left_out)} did not measure {y} and is skipped")
            curves = {curve.label: [folders[key] for key in curve.lines] for curve in whole}
            for row in self.bench.equal(curves, x, y):
                if (row["a"], row["b"]) in missing:
                    equal.ROWS.append(self.plan.file("_pairs"), {**row, "panel": label, "runs": runs})
        self.plan = self.plan.with_tests()
