"""Runs the missing runs of a suite, compares each with its vanilla AR, and keeps the rows of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.errors import RunError, UsageError
from specbench.rows.csv_files import RowFile, csv_text, to_csv
from specbench.storage.files import write_atomically
from specbench.tables.collect import LineRunner, as_text
from specbench.tables.measure import Need, Row, SuiteBench
from specbench.tables.suites import SuitePlan, SuiteRun

ROWS, COMPARED = "suite.csv", "compared.csv"  # in a suite's folder


@dataclass(frozen=True)
class SuiteRows:
    """What a suite has measured: its runs with their rows, completed by what vanilla AR gives, and the rows of
    `specbench compare` of runs with their vanilla AR. uncompared: why there is none of some."""

    plan: SuitePlan
    compared: tuple[Row, ...]
    uncompared: tuple[str, ...] = ()


def run(
    todo: SuitePlan, bench: SuiteBench, say: Callable[[str], None], jobs: int = 1
) -> tuple[SuiteRows, UsageError | RunError | None]:
    """Runs what is missing; a run that fails stops no other. Then as `gather`; and the error where runs failed."""
    runs = {one.folder: one for one in todo.runs}
    of_need = {id(one.need): one for one in todo.runs}
    ran: set[Path] = set()

    def keep(need: Need, row: Mapping[str, Any]) -> None:
        one = of_need[id(need)]
        runs[one.folder] = replace(one, need=replace(need, row=as_text(row)))
        ran.add(one.folder)

    def number(need: Need) -> str:
        one = of_need[id(need)]
        where = ", ".join(filter(None, [one.cell.model, one.cell.prompts]))
        seed = "" if one.cell.seed is None else f", seed {one.cell.seed}"
        return f"{list(runs).index(one.folder) + 1} of {len(runs)}, {one.line.label} on {where}{seed}" + (
            ", timed" if one.timed else ""
        )

    runner = LineRunner(
        todo.suite.table.id,
        todo.out,
        bench,
        say,
        jobs,
        folder=lambda need: todo.out / of_need[id(need)].folder,
        keep=keep,
        number=number,
    )
    failed: UsageError | RunError | None = None
    try:
        runner.measure([one.need for one in todo.missing], patient=True)
    except (UsageError, RunError) as e:
        failed = e
    return gather(replace(todo, runs=tuple(runs.values())), bench, ran, say), failed


def gather(
    plan: SuitePlan, bench: SuiteBench, ran: Iterable[Path] = (), say: Callable[[str], None] | None = None
) -> SuiteRows:
    """The rows of what is finished, each next to vanilla AR, kept in `ROWS` and `COMPARED`; ran: the folders of runs
    whose comparisons are older than their rows."""
    from specbench.compare import wording

    finished = {one.folder: one for one in plan.runs if one.need.row is not None}
    rows = []
    for one in plan.runs:
        if one.need.row is not None and not one.timed and one.reference in finished:
            row = {**one.need.row, **as_text(bench.versus(plan.out / one.folder, plan.out / one.reference, _n(one)))}
            finished[one.folder] = replace(one, need=replace(one.need, row=row))
        rows.append(finished.get(one.folder, one))
    kept = _read(wording.ROWS, plan.out / COMPARED)
    changed, compared, uncompared = set(ran), [], []
    for other, one in _pairs(plan, finished):
        same = [row for row in kept if (row["run_a"], row["run_b"]) == (_id(other), _id(one))]
        if not same or changed & {one.folder, other.folder}:
            if say is not None:
                say(f"{plan.suite.table.id}: {one.line.label} and {other.line.label}, image by image")
            try:
                found = bench.compare(plan.out / other.folder, plan.out / one.folder)
                same = [as_text({name: row.get(name) for name in wording.ROWS.columns}) for row in found]
            except UsageError as e:
                uncompared.append(str(e))
        compared += same
    if finished:
        bench.keep([(plan.out / one.folder, one.need.row or {}) for one in finished.values() if not one.timed])
        write_atomically(plan.out / ROWS, to_csv([one.need.row or {} for one in finished.values()]).encode())
    if compared:
        write_atomically(plan.out / COMPARED, csv_text(wording.ROWS.columns, compared).encode())
    return SuiteRows(replace(plan, runs=tuple(rows)), tuple(compared), tuple(dict.fromkeys(uncompared)))


def _pairs(plan: SuitePlan, finished: Mapping[Path, SuiteRun]) -> list[tuple[SuiteRun, SuiteRun]]:
    """Every run after its vanilla AR, and the runs of the suite's own tests, in the order of `specbench compare`."""
    quality = [one for one in finished.values() if not one.timed]
    found = [(finished[one.reference], one) for one in quality if one.reference and one.reference in finished]
    lines = {(one.cell, one.line.key): one for one in quality}
    for cell in plan.suite.cells():
        for test in plan.suite.table.tests:
            pair = lines.get((cell, test.other)), lines.get((cell, test.line))
            if pair[0] is not None and pair[1] is not None and pair not in found:
                found.append((pair[0], pair[1]))
    return found


def _n(one: SuiteRun) -> int:
    assert one.need.row is not None
    return int(float(one.need.row["n"]))


def _id(one: SuiteRun) -> str:
    return (one.need.row or {}).get("run_id", "")


def _read(file: RowFile, path: Path) -> list[dict[str, str]]:
    try:
        return file.read(path)
    except UsageError:
        return []  # computed again
