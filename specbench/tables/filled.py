"""The printed table of a plan: one line for every method on every model and set of prompts, with seeds pooled, and a
suite's paired tests of the differences from vanilla AR."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from specbench.config import parameters
from specbench.rows.columns import METRICS, Cells
from specbench.rows.paired import LEVEL
from specbench.rows.shown import MACHINE, is_biased
from specbench.tables import layout, literature
from specbench.tables.definitions import Column, Curve, Line, Maps, Panel, Series, Stack, Table, TableFigure, TableTest
from specbench.tables.layout import TableSheet
from specbench.tables.table_runs import COMPARED, TablePlan, TableRun

#: A column that is not a metric's -> its statistic in `specbench compare`.
_STATISTICS = {"perplexity": "log_prob_mean", "emitted_kl": "emitted_kl", "emitted_tv": "emitted_tv"}
#: The default x of a figure: the first of these that the table shows.
_FASTER = ("speedup_latency", "speedup_step", "step_compression", "accepted_length_mean")


def build(plan: TablePlan, command: str) -> tuple[TableSheet, Table, dict[str, Cells | None]]:
    """The sheet of the existing rows; its table, with the printed lines; and their rows. command: fills the table.

    A paper's table prints every line, next to the published ones. A suite prints the lines that run, for every model
    and set of prompts.
    """
    suite, lines, rows = plan.suite, plan.lines, plan.rows
    members = {key: [run for run in runs if not run.seconds] for key, runs in lines.items()}
    seeds = max((sum(run.row is not None for run in group) for group in members.values()), default=1)
    table = pooled_table = over_seeds(suite.table, seeds)
    models: str | dict[str, str] = plan.model
    printed = literature.load(table.id) if not suite.baseline and table.id in literature.available() else []
    if suite.baseline:
        shown = tuple(Line(key, runs[0].label, runs[0].overrides) for key, runs in lines.items())
        tests = _tests(suite.table, shown, plan.suffixes) if seeds == 1 else ()
        table = replace(table, lines=shown, tests=tests, figure=_figure(suite.table, shown, plan.suffixes))
        models = {key: ", ".join(filter(None, runs[0].cell.group)) for key, runs in lines.items()}
    p_values = _p_values(plan, members, table.columns)
    # A biased distance has no star: the bias of two methods can differ.
    significant = {cell for cell, p in p_values.items() if p < 1 - LEVEL}
    differing = {(key, name) for key, name in significant if not is_biased(rows[key] or {}, name)}
    commands = {key: runs[0].command for key, runs in lines.items()}
    table = replace(table, remarks=())
    sheet = layout.build(table, models, rows, printed, commands, command, plan.compared, differing)
    mark = (layout.DIFFERS, "Differs significantly from vanilla AR on the same prompts and seeds, by the test below.")
    notes = (*sheet.notes, *([mark] if differing else []))
    remarks = (*sheet.remarks, *_remarks(plan, members, seeds, len(p_values), len(differing)), *pooled_table.remarks)
    return replace(sheet, notes=notes, remarks=remarks), table, rows


def over_seeds(table: Table, seeds: int) -> Table:
    """The table of means over this number of seeds; its columns and a remark say so. Each line's note has the number of
    its finished runs."""
    if seeds < 2:
        return table
    columns = (
        c if c.std_over is None else replace(c, std_over="seeds", published_spread=c.printed_spread)
        for c in table.columns
    )
    remark = (
        f"Each value is the mean over {seeds} seeds, ± the standard deviation between them. A line that is not complete"
        " has fewer: its note gives their number, and one seed has no ±."
    )
    return replace(table, columns=tuple(columns), remarks=(remark, *table.remarks))


def _tests(table: Table, lines: Sequence[Line], suffixes: Mapping[tuple[str, str], str]) -> tuple[TableTest, ...]:
    """The table's own tests, for every model and set of prompts."""
    keys = [line.key for line in lines]
    expanded = (
        replace(test, line=f"{test.line}{suffix}", other=f"{test.other}{suffix}")
        for suffix in suffixes.values()
        for test in table.tests
    )
    return tuple(test for test in expanded if test.line in keys and test.other in keys)


def _figure(
    table: Table, lines: Sequence[Line], suffixes: Mapping[tuple[str, str], str]
) -> TableFigure | Series | Maps | Stack | None:
    """The suite's figure with a panel for every model and set of prompts. Default: quality against speed."""
    figure = table.figure
    if figure is not None and not isinstance(figure, TableFigure):
        return figure
    keys = [column.key for column in table.columns]
    if figure is None:
        x = next((key for key in _FASTER if key in keys), None)
        y = tuple(key for key in keys if key in METRICS)
        if x is None or not y:
            return None
        labels = {line.key: line.label for line in table.lines if not _is_vanilla(line)}
        panels_of_table = [replace(panel, curves=_labelled(panel, labels)) for panel in table.panels]
        figure = TableFigure((x,), y, "", tuple(panels_of_table))
    existing = {line.key for line in lines}
    panels = []
    for group, suffix in suffixes.items():
        vanilla = next((line.key for line in lines if line.key.endswith(suffix) and _is_vanilla(line)), "")
        for panel in figure.panels:
            curves = tuple(
                Curve(curve.label, tuple(f"{key}{suffix}" for key in curve.lines if f"{key}{suffix}" in existing))
                for curve in panel.curves
            )
            label = ", ".join(filter(None, [panel.label, *(group if suffix else ())]))
            baseline = panel.baseline or figure.baseline
            panels.append(Panel(label, curves, f"{baseline}{suffix}" if baseline else vanilla))
    return TableFigure(figure.x, figure.y, "", tuple(panels), figure.log)


def _labelled(panel: Panel, labels: Mapping[str, str]) -> tuple[Curve, ...]:
    """The curves of a panel without vanilla. A curve of a single line has the line's label."""
    curves = (Curve(curve.label, tuple(key for key in curve.lines if key in labels)) for curve in panel.curves)
    return tuple(replace(c, label=labels[c.lines[0]]) if len(c.lines) == 1 else c for c in curves if c.lines)


def _is_vanilla(line: Line) -> bool:
    return "method=vanilla" in (line.overrides or ())


# --- differences from vanilla -----------------------------------------------------------------------------------------


def _p_values(
    plan: TablePlan, members: Mapping[str, Sequence[TableRun]], columns: Sequence[Column]
) -> dict[tuple[str, str], float]:
    """(line, column) -> the two-sided p-value of its difference from vanilla AR (for several seeds, of the means over
    them), with the adjustment of `COMPARED`."""
    tests = {(row["run_a"], row["run_b"], row["statistic"]): row for row in plan.compared}
    adjusted: dict[tuple[str, str], float] = {}
    for key, runs in members.items():
        shown = [run.row for run in runs if run.row is not None and run.reference is not None]
        shown = [row for row in shown if row.get("baseline_run_id")]  # vanilla AR is finished
        ids = [" / ".join(row[name] for row in shown) for name in ("baseline_run_id", "run_id")]
        for column in columns:
            names = [_STATISTICS[column.key]] if column.key in _STATISTICS else _metrics_of(plan, column.key)
            for name in names:
                row = tests.get((ids[0], ids[1], name))
                if row is not None and row["p"]:
                    adjusted[key, column.key] = float(row["p_holm"])
    return adjusted


def _metrics_of(plan: TablePlan, column: str) -> list[str]:
    """The metrics of the comparisons whose first column is `column`."""
    names = dict.fromkeys(row["statistic"] for row in plan.compared)
    known = parameters.single_metrics()
    return [name for name in names if name in known and parameters.metric_columns(name)[0] == column]


def _remarks(
    plan: TablePlan, members: Mapping[str, Sequence[TableRun]], seeds: int, tests: int, significant: int
) -> Iterator[str]:
    suite = plan.suite
    mixed = {
        name
        for runs in members.values()
        for name in ("commit", *MACHINE)
        if len({run.row.get(name) for run in runs if run.row is not None}) > 1
    }
    if mixed:
        yield f"Seeds of one line differ in {', '.join(sorted(mixed))}: compare them with care."
    if suite.timed:
        yield (
            f"Columns in seconds come from runs over {suite.timed} prompts, one image at a time, alternating with"
            " vanilla AR; all other columns come from runs in batches."
        )
    if tests:
        many = f"{significant} of {tests} are significant"
        yield (
            f"Differences from vanilla AR, paired by prompt, in {tests} values of quality: {many} (p <"
            f" {1 - LEVEL:.2g} after Holm's adjustment over all tests of {COMPARED} or, with several seeds, over all"
            f" tests of means over seeds). All tests, with intervals: {COMPARED}."
        )
    if seeds > 1 and suite.table.tests:
        yield f"The tests between lines are made for each seed and for the means over seeds: {COMPARED}."
    yield from (f"Not compared with vanilla AR: {text}." for text in plan.uncompared[:3])
    yield from plan.left_out
