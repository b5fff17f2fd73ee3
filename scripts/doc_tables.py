"""Tables in pages, which `pages` draws from rows. A function takes the plan of a table of `specbench tables`,
and a slot its name:

    table('field', 'step_compression, emitted_kl', lines='vanilla, sjd')
    table_of_pairs('relaxed_equal', 'UniformRSD', 'Cool-SD, exponential', 'band')
    table_of_curves('relaxed', 'emitted_kl', 'EAGLE-1, chain of 5', 2.0, 2.2)
    table_of_panel('windows', 'Jacobi windows', 'step_compression', 16, 32)
    joined_table(table('field', 'step_compression'), {'speed-up (×)': table('field_seconds', 'speedup_latency')})

The functions in `WHOLE` read files and take no name, as `table_of_audit()`, or join drawn tables (`joined_table`,
`side_by_side`).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from specbench.audit import model_recipes, verdicts
from specbench.config import configuration, parameters
from specbench.errors import UsageError
from specbench.rows import provenance, report_text
from specbench.rows.columns import SHOWN, stderr_of
from specbench.rows.csv_files import read_rows
from specbench.rows.paired import LEVEL
from specbench.storage.csv_text import csv_lines
from specbench.tables import matched
from specbench.tables.definitions import Column, Panel, TableFigure, row_column
from specbench.tables.figures import point
from specbench.tables.layout import doubts
from specbench.tables.table_runs import TablePlan

ROOT = Path(__file__).resolve().parents[1]
SAMPLING = ("cfg_scale", "temperature", "top_k", "top_p")
#: From the worst one on, and the numbers of a row that they depend on.
_VERDICTS = {"not lossless": "refuted", "undecided": "undecided", "not refuted": "not refuted", "lossless": "lossless"}
_OF_VERDICTS = ("p_value", "margin", "tv_high", "ks_high", "tv_exact", "emitted_tv")
#: Of a published claim.
_STATUSES = ("confirmed", "refuted", "mixed", "not confirmed", "untested")
Row = Mapping[str, str]
#: Relative errors below this are rounding: of statistics that are sums of float32.
_FLOAT32 = 1e-6
_PROPER = ("Fréchet", "Inception")


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A table of its head and its rows."""
    head, *body = [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join([head, f"|{'---|' * (head.count(' | ') + 1)}\n", *body])


def table(plan: TablePlan, columns: str, lines: str = "") -> Iterator[Sequence[str]]:
    """The named columns of all lines, or of the named ones. ± is the standard error. UsageError for a line without a
    row, and for a column that tables do not show."""
    shown_table, rows = plan.table, plan.rows
    labels = {line.key: line.label for line in shown_table.lines}
    chosen, names = _listed(lines) or list(labels), _listed(columns)
    if missing := [key for key in chosen if rows.get(key) is None]:
        raise UsageError(f"table {shown_table.id} has no row for its line {missing[0]} (lines: {', '.join(labels)})")
    table_columns = {column.key: column for column in shown_table.columns}
    if unknown := [key for key in names if key not in table_columns and key not in SHOWN]:
        raise UsageError(f"tables show no column {unknown[0]} (table of {shown_table.id} in a page)")
    chosen_columns = [table_columns.get(key) or row_column(key) for key in names]
    doubted = doubts(replace(shown_table, columns=tuple(chosen_columns)), rows)
    yield ["method", *(heading(column.label) for column in chosen_columns)]
    for key in chosen:
        cells = [cell(column, rows[key] or {}) for column in chosen_columns]
        marks = [" (in doubt)" if (key, column.key) in doubted else "" for column in chosen_columns]
        yield [labels[key], *map(str.__add__, cells, marks)]


def table_of_pairs(plan: TablePlan, first: str, *others: str, y: str = "") -> Iterator[Sequence[str]]:
    """For each panel that has pairs of the first curve, the ratio of every other one to it with its interval. Bold: the
    curve differs from the first one by Holm's adjustment over all pairs. y: the compared column, if there are
    several."""
    groups = {key: pairs for key, pairs in matched.adjusted_pairs(plan).items() if y in ("", key[-1])}
    curves = {row[end] for pairs in groups.values() for row, _ in pairs for end in ("a", "b")}
    if unknown := [name for name in (first, *others) if name not in curves]:
        raise UsageError(
            f"results/{plan.table.id}_pairs.csv has no pair with {unknown[0]} (curves: {', '.join(curves)})"
        )
    if len(columns := {key[1:] for key in groups}) > 1:
        raise UsageError(f"{plan.table.id} compares {len(columns)} pairs of columns: name one with y=")
    yield ["draft", "prompts", *others]
    for (panel, _, _), pairs in groups.items():
        cells = {}
        for row, p in pairs:
            if row["a"] == first:
                text = matched.ratio(row) or matched.signed(row, 2)
                cells[row["b"]] = f"**{text}**" if p < 1 - LEVEL else text
        if not cells.keys().isdisjoint(others):
            yield [panel, pairs[0][0]["prompts"], *(cells.get(name, "—") for name in others)]


def table_of_curves(plan: TablePlan, y: str, panel: str, *values: float) -> Iterator[Sequence[str]]:
    """y of every curve of a panel where the figure's x has these values."""
    decimals = row_column(y).decimals
    curves_by_x = {value: curves_at(plan, panel, y, value) for value in values}
    assert isinstance(plan.table.figure, TableFigure)
    yield [heading(row_column(plan.table.figure.x[0]).label), *next(iter(curves_by_x.values()))]
    for value, curves in curves_by_x.items():
        yield [f"{value}", *("—" if at is None else f"{at:.{decimals}f}" for at in curves.values())]


def table_of_panel(plan: TablePlan, panel: str, y: str, *values: float) -> Iterator[Sequence[str]]:
    """y of every curve of a panel in its rows whose x is one of these values."""
    (figure, chosen), rows, column = _panel(plan, panel), plan.rows, row_column(y)
    [x] = figure.x
    yield ["method", *(f"{value}" for value in values)]
    for curve in chosen.curves:
        by_x = {float(row[x]): row for key in curve.lines if (row := rows.get(key))}
        yield [curve.label, *(cell(column, by_x[value]) if value in by_x else "—" for value in values)]


def curves_at(plan: TablePlan, panel: str, y: str, value: float) -> dict[str, float | None]:
    """By label, y of the curves of a panel where the figure's x has this value, on the straight lines between their
    rows; None where a curve does not reach it. UsageError without such a panel."""
    (figure, chosen), rows = _panel(plan, panel), plan.rows
    points = {c.label: [point(rows.get(key), figure.x[0], y) for key in c.lines] for c in chosen.curves}
    return {label: interpolated([p[:2] for p in curve if p], value) for label, curve in points.items()}


def _panel(plan: TablePlan, label: str) -> tuple[TableFigure, Panel]:
    """A table's figure and its panel with this label. UsageError without such a panel."""
    figure = plan.table.figure
    panels = {panel.label: panel for panel in figure.panels} if isinstance(figure, TableFigure) else {}
    if not isinstance(figure, TableFigure) or label not in panels:
        raise UsageError(f"table {plan.table.id} has no panel {label} (panels: {', '.join(panels)})")
    return figure, panels[label]


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """y at x on the straight lines between points (x, y); None outside of them."""
    for (x0, y0), (x1, y1) in pairwise(sorted(points)):
        if x0 <= x <= x1 and x1 > x0:
            return y0 + (x - x0) / (x1 - x0) * (y1 - y0)
    return None


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def cell(column: Column, row: Row) -> str:
    """A value ± its standard error, which has at least one significant digit; a dash for a missing value."""
    if not row.get(column.key):
        return "—"
    value, error = float(row[column.key]), float(row.get(stderr_of(column.key)) or 0)
    if abs(value) < column.rounding:
        return "0"
    if error < _FLOAT32 * abs(value):
        error = 0.0
    decimals = column.decimals if not error else max(column.decimals, -math.floor(math.log10(error)))
    return f"{value:.{decimals}f}" + (f" ± {error:.{decimals}f}" if error else "")


def heading(label: str) -> str:
    """A label as a heading in a sentence: "Step compression" -> "step compression"; "CLIP score" does not change."""
    return label if label[1:2].isupper() or label.startswith(_PROPER) else label[:1].lower() + label[1:]


_BY_PLAN = (table, table_of_pairs, table_of_curves, table_of_panel)
DRAWN = {draw.__name__: draw for draw in _BY_PLAN}


def joined_table(first: str, others: Mapping[str, str]) -> str:
    """A drawn table with one more column for each of the other drawn tables: its last column, under the given heading.
    A line that the other table does not have gets a dash."""
    rows = _cells(first)
    for title, other in others.items():
        last = {row[0]: row[-1] for row in _cells(other)}
        rows = [[*rows[0], title], *([*row, last.get(row[0], "—")] for row in rows[1:])]
    return markdown(rows)


def side_by_side(tables: Mapping[str, str]) -> str:
    """Drawn tables of the same lines as one: every column with the name of its table."""
    every = {name: _cells(drawn) for name, drawn in tables.items()}
    first = next(iter(every.values()))
    if any([row[0] for row in cells] != [row[0] for row in first] for cells in every.values()):
        raise UsageError(f"tables {', '.join(tables)} do not have the same lines")
    heads = [first[0][0], *(f"{title}, {name}" for name, cells in every.items() for title in cells[0][1:])]
    body = [[row[0], *(text for cells in every.values() for text in cells[i][1:])] for i, row in enumerate(first)]
    return markdown([heads, *body[1:]])


def stacked_table(first: str, tables: Mapping[str, str]) -> str:
    """Drawn tables of one line each as one table: every line begins with the name of its table, instead of its own
    first cell. first: the heading of the names."""
    every = {name: _cells(drawn) for name, drawn in tables.items()}
    heads = {tuple(head[1:]) for head, *_ in every.values()}
    if len(heads) > 1 or any(len(cells) != 2 for cells in every.values()):
        raise UsageError(f"tables {', '.join(tables)} do not have one line each of the same columns")
    return markdown([[first, *heads.pop()], *([name, *line[1:]] for name, (_, line) in every.items())])


def _cells(drawn: str) -> list[list[str]]:
    head, _, *body = drawn.splitlines()
    return [line[2:-2].split(" | ") for line in (head, *body)]


def table_of_audit() -> str:
    """The results of the audit of every preset."""
    rows = _read("audit")
    body = [["method", "rows", "TV on tables", "TV on real classes", "KS of continuous tokens", "smallest p-value"]]
    for method in sorted({row["method"] for row in rows}):
        matches = [row for row in rows if row["method"] == method]
        real = [row for row in matches if row["model"] in model_recipes.TINY]
        tables = [row for row in matches if row["V"] and row not in real]
        whole = verdict(matches)
        distances = [_distance(group, whole, "tv_low", "tv_high") for group in (tables, real)]
        distances.append(_distance([row for row in matches if row["dim"]], whole, "ks_high"))
        body.append([f"`{method}`", f"{len(matches)}", *distances, _least(matches)])
    return markdown(body)


def table_of_variants() -> str:
    """The results of the audit of every variant."""
    rows = _read("audit_variants")
    body = [["method", "variant", "rows", "verdict, TV over all rows", "smallest p-value"]]
    for method, variant in dict.fromkeys((row["method"], row["variant"]) for row in rows):
        matches = [row for row in rows if (row["method"], row["variant"]) == (method, variant)]
        distance = _distance(matches, verdict(matches), "tv_low", "tv_high")
        body.append([f"`{method}`", f"`{variant}`", f"{len(matches)}", distance, _least(matches)])
    return markdown(body)


def table_of_mistakes() -> str:
    """The audit or the test that catches each mistake of `make mutants`."""
    body = [["mistake", "audited method", "samples", "model"]]
    for row in _read("mutants"):
        samples = f"{int(row['samples']):,}" if row["samples"] else "none: its test"
        body.append(
            [row["mistake"].replace("|", "\\|"), f"`{row['method']}`", samples, row["model"] and f"`{row['model']}`"]
        )
    return markdown(body)


def table_of_claims(template: Path = ROOT / "docs/templates/docs/findings.md") -> str:
    """How many published claims of each paper have which status. A row: | paper, place | claim | status | ... |."""
    _, _, rows = template.read_text(encoding="utf-8").partition("\n| paper, place | claim | status |")
    body, papers = [["paper", "claims", *_STATUSES]], dict[str, Counter[str]]()
    for paper, claim, cell in re.findall(r"(?m)^\| ([^,|]+),[^|]* \| ([^|]+) \| ([^|]+) \|", rows):
        status = re.fullmatch(rf"({'|'.join(_STATUSES)})(?: in kind)?( \(weak\))?", cell)
        if status is None:
            raise UsageError(f"{template.name}: a claim without a status: {claim}")
        counts = Counter(claims=1, **{status[1]: 1, f"{status[1]}, weak": int(bool(status[2]))})
        papers[paper] = papers.get(paper, Counter()) + counts
    body += [[paper, *_counted(counts)] for paper, counts in papers.items()]
    return markdown([*body, ["**all**", *_counted(sum(papers.values(), Counter()))]])


def _counted(counts: Mapping[str, int]) -> list[str]:
    """The number of claims, and of each status, with its number of weak ones."""
    weak = {name: counts.get(f"{name}, weak") for name in _STATUSES}
    cells = (f"{counts.get(name, 0)}" + (f" ({weak[name]} weak)" if weak[name] else "") for name in _STATUSES)
    return [f"{counts['claims']}", *cells]


def table_of_rehearsals() -> str:
    """The latest rehearsals at official size."""
    rows = {(row["model"], row["stage"]): row for row in _read("rehearsal") if row["scale"] == "full"}
    body = [["model", "command", "seconds", "memory, GB", "its budget, GB", "with mapped files, GB"]]
    values = ("seconds", "anonymous_gb", "budget_gb", "resident_gb")
    for row in rows.values():
        body.append([f"`{row['model']}`", f"`{row['command']}`", *(row[name] for name in values)])
    return markdown(body)


#: What the part `speed` of check_gpu.py calls a target, and its heading.
_TARGETS = {"XL": "LlamaGen-XL", "7B": "Lumina-mGPT 7B", "EMU3": "Emu3 8B"}


def table_of_gpu_steps(engine: str = "triton") -> str:
    """Milliseconds of a recorded step by method and target, and relative to vanilla's step of the same engine."""
    rows = {row["check"]: row for row in _read("gpu/checks") if row["stage"] == "6" and row["result"] == "PASS"}
    body = [["a step of", *(f"{heading}, ms" for heading in _TARGETS.values())]]
    methods = dict.fromkeys(
        check.partition(" ")[2].removesuffix(f", {engine}") for check in rows if check.endswith(f", {engine}")
    )
    for method in methods:
        body.append([method, *(_gpu_step(rows.get(f"{target} {method}, {engine}")) for target in _TARGETS)])
    return markdown(body)


def _gpu_step(row: Row | None) -> str:
    if row is None:
        return "not measured"
    relative = f" ({float(row['of_vanilla']):.2f}×)" if row["of_vanilla"] else ""
    return f"{float(row['measured']):.2f}{relative}"


def table_of_gpu_gates() -> str:
    """Every gate and its measurement."""
    body = [["gate", "measured", "gate", "least time at the measured bandwidth", "share of it", "verdict"]]
    for row in _read("gpu/checks"):
        if row["stage"] == "4" and row["gate"] and "not tuned" not in row["check"]:
            numbers = [f"{float(row[name]):.3f}" if row[name] else "" for name in ("measured", "gate", "floor")]
            share = f"{float(row['share_of_bandwidth']):.0%}" if row["share_of_bandwidth"] else ""
            body.append([row["check"], *(f"{x} {row['unit']}" if x else "" for x in numbers), share, row["result"]])
    return markdown(body)


def _read(name: str) -> list[Row]:
    return [row for _, row in csv_lines(ROOT / f"results/{name}.csv")[1]]


def _least(rows: Sequence[Row]) -> str:
    least = min(float(row["p_value"]) for row in rows)
    return f"{least:.2g}" if least else "< 1e-300"  # underflow


def verdict(rows: Iterable[Mapping[str, Any]]) -> str:
    """The verdict over all rows of an audit's file together, with numbers as text or as numbers."""
    return verdicts.verdict(
        {name: float(row[name]) if row.get(name, "") != "" else None for name in _OF_VERDICTS}
        | {"T": int(row["T"]), "model": row["model"], "exercised": row.get("exercised", "")}
        for row in rows
    )


def _distance(rows: Sequence[Row], whole: str, *columns: str) -> str:
    """The verdict of the rows, and the largest limits, which hold for the largest distance. whole: the verdict over all
    rows of the method. It is undecided if they leave out a part of the method, and then each group of them is."""
    if not rows:
        return ""
    own = verdict({**row, "exercised": ""} for row in rows)
    limits = [f"{max(float(row[column]) for row in rows):.3f}" for column in columns]
    shown = next(shown for name, shown in _VERDICTS.items() if name in {own} | {whole} - {"not lossless"})
    return f"{shown}: {' to '.join(limits)}" if shown == "refuted" and limits[1:] else f"{shown}: <= {limits[-1]}"


def table_of_settings() -> str:
    """The settings of every real model, and the published protocols and released codes that differ from them."""
    protocols, methods = _settings("protocol"), _settings("method")
    others = ("published protocols that set others", "released variants that set others")
    body = [["model", "guidance", "temperature", "top-k", "top-p", *others]]
    for model, settings in _settings("model").items():
        if settings.get("weights") != "official" or settings["kind"] != "discrete":
            continue
        published: dict[str, list[str]] = {}
        for name, protocol in protocols.items():
            if differing := _others(protocol["models"].get(model) or {}, settings):
                published.setdefault(differing, []).append(f"`{name}`")
        released = [
            f"`{name} variant={variant}`: {' '.join(f'{k}={_text(v)}' for k, v in values['models'][model].items())}"
            for name, method in methods.items()
            for variant, values in (method.get("variants") or {}).items()
            if model in (values.get("models") or {})
        ]
        cells = [f"`{model}`", *(_text(settings[name]) for name in SAMPLING)]
        cells.append("; ".join(f"{', '.join(names)}: {differing}" for differing, names in published.items()))
        body.append([*cells, "; ".join(released)])
    return markdown(body)


def _settings(folder: str) -> dict[str, Mapping[str, Any]]:
    names = sorted(path.stem for path in (ROOT / "conf" / folder).glob("*.yaml"))
    return {name: parameters.content(folder, name) for name in names}


def _text(value: Any) -> str:
    if value is None or value == "off":
        return "off"
    if isinstance(value, list):
        return " or ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _others(published: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The settings in which a protocol differs from the model; null: its paper does not state the setting."""
    stated = {name: published[name] for name in ("unconditional", *SAMPLING) if published.get(name) is not None}
    return " ".join(f"{name}={_text(x)}" for name, x in stated.items() if _text(x) != _text(settings[name]))


def table_of_commits() -> str:
    """The commits of the rows under results/, and why numbers.yaml excepts those that are not of its commit."""
    results = ROOT / "results"
    about = yaml.safe_load((results / "numbers.yaml").read_text(encoding="utf-8"))
    made: dict[str, Counter[str]] = {}
    for path in sorted(results.rglob("*.csv")):
        columns, lines = csv_lines(path)
        for _, row in lines if "commit" in columns else ():
            made.setdefault(row["commit"], Counter())[path.relative_to(results).as_posix()] += 1
    body = [["commit", "rows", "of", "why not of the first one"]]
    for commit, files in sorted(made.items(), key=lambda item: -item[1].total()):
        name = commit[:8] + "-dirty" * commit.endswith("-dirty")
        if commit.startswith(str(about["commit"])):
            body.append([f"`{name}`", str(files.total()), "all other files", ""])
            continue
        why = {_why(about["except"], file) for file in files}
        body.append([f"`{name}`", str(files.total()), ", ".join(f"`{file}`" for file in files), "; ".join(sorted(why))])
    return markdown(body)


def _why(exceptions: Mapping[str, str | Mapping[str, str]], file: str) -> str:
    matching = [pattern for pattern in exceptions if Path(file).match(pattern)]
    entry = exceptions[max(matching, key=lambda pattern: pattern.count("/"))]
    return entry if isinstance(entry, str) else entry["reason"]


def main_job() -> str:
    """The lines with which `make run` ends, by its row."""
    [row] = read_rows(ROOT / "results/main_job.csv")
    config = configuration.compose(["method=cool_sd", "delta=1.1", "n=16"])
    if row["config_hash"] != provenance.config_hash(config):
        raise UsageError("results/main_job.csv is not of today's main job: run it again, and collect its row")
    lines = report_text.report(row, config).splitlines()
    drawn = "\n".join(textwrap.fill(line, 116, subsequent_indent=" " * 19) for line in lines)
    return f"```text\n{drawn}\n```"


WHOLE = {
    draw.__name__: draw
    for draw in (
        table_of_audit,
        table_of_mistakes,
        table_of_variants,
        table_of_claims,
        table_of_settings,
        table_of_rehearsals,
        table_of_gpu_steps,
        table_of_gpu_gates,
        table_of_commits,
        joined_table,
        side_by_side,
        stacked_table,
        main_job,
    )
}
