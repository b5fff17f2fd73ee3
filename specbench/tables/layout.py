"""The content of a table: every cell with the notes that explain it (`TableSheet`), and its arrangement for readers
(`PrintedTable`).

Measured and published values never share a cell. A cell without a value carries a note with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_lowercase
from typing import Any

from specbench.config import parameters
from specbench.errors import UsageError
from specbench.rows import remark_text
from specbench.rows.columns import COLUMNS, SPEEDUPS, TIMED_COLUMNS, Cells, stderr_of
from specbench.rows.paired import half_interval
from specbench.rows.remark import Remark, remarks_of
from specbench.rows.selection import spread_of
from specbench.rows.shown import common_machine, doubt, elsewhere
from specbench.tables.catalog import TABLES
from specbench.tables.definitions import MOST_DECIMALS, Column, Line, Table, TableTest, row_column
from specbench.tables.literature import DRAFTERS, PublishedRow
from specbench.tables.table_runs import compared_row, timed_row

#: The mark of a value that differs significantly from vanilla AR's.
DIFFERS = "*"
#: With at most so many published models, the measured and the published values of a method are in one line.
SIDE_BY_SIDE = 2
_NOT_PRINTED = "Not in the paper's table."
_NO_DIFFERENCE = "One of the two values is missing."
#: Labels of the lines above the table, and the columns of the measured rows that they list.
_PROVENANCE = (
    ("Device", ("device_name", "device", "threads", "dtype", "engine")),
    ("Software", ("specbench", "torch", "driver", "python")),
    ("Commit", ("commit",)),
    ("Model", ("model", "weights")),
    ("Sampling", ("temperature", "top_k", "top_p", "entropy_temperature", "top_n_sigma", "cfg_scale", "seed")),
    ("Prompts", ("data", "split", "n", "batch")),
)
#: Those that the seconds of further runs have for themselves.
_OF_SECONDS = ("Device", "Software", "Commit", "Date")
_WITHOUT_NAME = ("device_name", "device", "dtype", "engine", "commit", "model", "weights", "data", "split")


@dataclass(frozen=True)
class TableCell:
    """A value as text, its spread as text ("" = none) and the marks of its notes. "" is a missing value. bold: whether
    it is printed so, as measured values next to published ones are."""

    value: str = ""
    spread: str = ""
    marks: tuple[str, ...] = ()
    bold: bool = False


@dataclass(frozen=True)
class Header:
    """The head of a column: its label, the better direction ("higher", "lower", or "" for neither), and the marks of
    its notes. source: where its values come from, with the marks of its notes; "" if the lines say so."""

    label: str
    better: str
    marks: tuple[str, ...]
    source: str = ""
    source_marks: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.label}, {self.source}" if self.source else self.label


@dataclass(frozen=True)
class TableEntry:
    """The values of a method from one source. kind: "measured", "published", or "difference", which is measured minus
    published; row_id: the row with its values."""

    method: str
    kind: str
    model: str
    marks: tuple[str, ...]
    cells: tuple[TableCell, ...]
    row_id: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class TableSheet:
    """Everything about a table. Renderers add no facts. A method's entries begin with the measured one."""

    id: str
    title: str
    paper: str
    facts: tuple[tuple[str, str], ...]
    headers: tuple[Header, ...]
    entries: tuple[TableEntry, ...]
    notes: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]


@dataclass
class Notes:
    """One mark per distinct text: a, b, ..., z, aa, ab, ..."""

    marks: dict[str, str] = field(default_factory=dict)  # by text

    def mark(self, text: str) -> str:
        return self.marks.setdefault(text, self._letter(len(self.marks)))

    def gap(self, text: str) -> TableCell:
        """A cell without a value, with the reason as its note."""
        return TableCell(marks=(self.mark(text),))

    @staticmethod
    def _letter(i: int) -> str:
        return ascii_lowercase[i] if i < 26 else Notes._letter(i // 26 - 1) + ascii_lowercase[i % 26]

    def all(self) -> tuple[tuple[str, str], ...]:
        return tuple((mark, text) for text, mark in self.marks.items())


def number(text: str, decimals: int) -> str:
    """A measured number for print, with `decimals` decimals, or more if three significant digits need them.

    Raises ValueError for a value that is not a finite number.

    >>> number("0.04567", 2), number("170.1449", 2), number("1", 2)
    ('0.0457', '170.14', '1.00')
    """
    return f"{float(text):.{_decimals(text, decimals)}f}"


def _decimals(text: str, decimals: int) -> int:
    value = abs(float(text))
    if not math.isfinite(value):
        raise ValueError(text)
    return decimals if value == 0 else min(MOST_DECIMALS, max(decimals, 2 - math.floor(math.log10(value))))


def build(
    table: Table,
    model: str | Mapping[str, str],
    measured: Mapping[str, Cells | None],
    published: Sequence[PublishedRow],
    commands: Mapping[str, str],
    command: str,
    comparisons: Sequence[Cells] = (),
    differing: Container[tuple[str, str]] = (),
) -> TableSheet:
    """Puts the measured rows (line key -> row, None = not measured) next to the printed ones.

    Every line of the definition appears once as measured for `model`, once for each model that the paper prints, and
    with the difference if one of these is `model` itself.

    Args:
        model: of the table, or by the keys of its lines.
        commands: line key -> the command of its run.
        command: fills the whole table.
        comparisons: the rows of `specbench compare` that its tests need.
        differing: the (line key, column key) whose values get the mark `DIFFERS`.
    """
    models = {line.key: model for line in table.lines} if isinstance(model, str) else model
    sheet = _Builder(table, measured, published, command, differing)
    headers = tuple(map(sheet.header, sheet.table.columns))
    entries = tuple(entry for line in table.lines for entry in sheet.entries(line, models[line.key]))
    tests = [test for test in table.tests if {test.line, test.other} <= models.keys()]
    remarks = [_tested(table, test, models[test.line], sheet.rows, comparisons, published) for test in tests]
    remarks += table.remarks
    for label, names in (("devices", ("device_name", "device")), ("commits", ("commit",))):
        if len({tuple(row.get(name, "") for name in names) for row in sheet.present}) > 1:
            remarks.insert(0, f"The measured lines come from different {label}: compare them with care.")
    about = (*facts(sheet.present), ("Command", command))
    runs = tuple((line.label, commands[line.key]) for line in table.lines if line.key in commands)
    return TableSheet(
        table.id, table.title, table.paper, about, headers, entries, sheet.notes.all(), tuple(remarks), runs
    )


class _Builder:
    """Makes headers and entries of a table from its rows, and collects their notes."""

    def __init__(
        self,
        table: Table,
        measured: Mapping[str, Cells | None],
        published: Sequence[PublishedRow],
        command: str,
        differing: Container[tuple[str, str]],
    ) -> None:
        rows = {line.key: measured.get(line.key) for line in table.lines}
        self.table = replace(table, columns=(*table.columns, *_new_metrics(rows)))
        self.rows, self.doubts = rows, doubts(self.table, rows)
        self.present = [row for row in self.rows.values() if row is not None]
        self.published, self.command, self.differing, self.notes = published, command, differing, Notes()

    def header(self, column: Column) -> Header:
        """The header of a column. Its note names the backend of the measured values, their spread, and the meaning of
        the published values."""
        parts = []
        rows = [(line.label, self.rows[line.key] or {}) for line in self.table.lines]
        valued = [(label, row) for label, row in rows if row.get(column.key)]
        if column.backend:
            backends: dict[str, list[str]] = {}
            for label, row in valued:
                backends.setdefault(row.get(column.backend) or "backend not recorded", []).append(label)
            for name, labels in backends.items():
                parts.append(f"measured by {name}" + (f" ({', '.join(labels)})" if len(backends) > 1 else ""))
        if column.measured_as:
            parts.append(f"measured: {column.measured_as}")
        if column.spread and any(row.get(column.spread) for _, row in valued):
            parts.append(f"± its {column.spread_is}")
        parts += _said(column, [row for _, row in valued])
        if column.published_as and self.published:
            parts.append(f"published: {column.published_as}")
        mark = (self.notes.mark(f"{column.label}: {'; '.join(parts)}."),) if parts else ()
        return Header(column.label, column.better, mark)

    def entries(self, line: Line, model: str) -> Iterator[TableEntry]:
        """The measured line, then the lines that papers print for it."""
        row = self.rows[line.key]
        yield self._measured(line, model, row)
        if line.published is not None:
            for name in dict.fromkeys(printed.model for printed in self.published):
                printed = self._printed(line, name)
                yield self._published(line, name, printed)
                if printed and row and printed.model_name == model and _same_drafter(row, printed):
                    yield self._difference(line, row, printed)

    def _measured(self, line: Line, model: str, row: Cells | None) -> TableEntry:
        columns, notes = self.table.columns, self.notes
        if row is None:
            why = self.table.no_run(line, model) or f"Not measured yet; to measure it: {self.command}"
            return TableEntry(line.label, "measured", model, (), (notes.gap(why),) * len(columns))
        cells = tuple(self._measured_cell(line, column, row) for column in columns)
        own = [r for r in remarks_of(row) if r.column not in COLUMNS]
        timed = [r for r in remarks_of(timed_row(row)) if r.column not in COLUMNS and r not in own]
        marks = (
            *(notes.mark(f"Remark of the run: {remark_text.said(r)}.") for r in own),
            *(notes.mark(f"Remark of the timed run: {remark_text.said(r)}.") for r in timed),
        )
        return TableEntry(line.label, "measured", model, marks, cells, row_id=row.get("run_id", ""))

    def _measured_cell(self, line: Line, column: Column, row: Cells) -> TableCell:
        text, place = row.get(column.key, ""), (line.key, column.key)
        if not text:
            why = remark_text.of_column(remarks_of(row), column.key)
            return self.notes.gap(f"The run did not measure this{why and f': {why}'}.")
        spread = row.get(column.spread, "") if column.spread else ""
        try:
            if spread and not math.isfinite(float(spread)):
                raise ValueError(spread)
            text = "0" if abs(float(text)) < column.rounding else text
            decimals = _decimals(text, column.decimals)
            shown = number(text, column.decimals), f"{float(spread):.{decimals}f}" if spread else ""
        except ValueError as e:
            where = f"row {row.get('run_id', '?')} of table {self.table.id}"
            raise UsageError(
                f"{column.key} of {where} is not a finite number ({e}): remove that row and try again"
            ) from None
        doubted = (self.notes.mark(self.doubts[place]),) if place in self.doubts else ()
        return TableCell(*shown, (*doubted, DIFFERS) if place in self.differing else doubted)

    def _printed(self, line: Line, model: str) -> PublishedRow | None:
        same = [r for r in self.published if r.model == model and r.fits(line.published or {})]
        if len(same) > 1:
            names = ", ".join(r.row_id for r in same)
            raise UsageError(f"published rows {names} all match '{line.label}' of table {self.table.id}")
        return same[0] if same else None

    def _published(self, line: Line, model: str, row: PublishedRow | None) -> TableEntry:
        notes = self.notes
        if row is None:
            gaps = (notes.gap(_NOT_PRINTED),) * len(self.table.columns)
            return TableEntry(line.label, "published", model, (), gaps)
        hint = f"Evidence grade '{row.evidence}': a hint, not the paper's own table."
        marks = () if row.trusted else (notes.mark(hint),)
        cells = []
        for column in self.table.columns:
            text, spread = row.cells.get(column.printed, ""), row.cells.get(column.printed_spread, "")
            cells.append(TableCell(text, spread) if text else notes.gap("The paper prints no value here."))
        return TableEntry(line.label, "published", model, marks, tuple(cells), row.row_id, row.evidence)

    def _difference(self, line: Line, row: Cells, printed: PublishedRow) -> TableEntry:
        """Measured minus published, for one model. The interval is the measured value's, since papers print no standard
        errors."""
        cells = []
        for column in self.table.columns:
            text, published = row.get(column.key, ""), printed.cells.get(column.printed, "")
            if not text or not published:
                cells.append(self.notes.gap(_NO_DIFFERENCE))
            elif column.key == "clip_score" and printed.cells.get("clip_scale", "cosine") != "cosine":
                cells.append(self.notes.gap("The paper's values are on another scale."))
            else:
                half = half_width(row, column.key)
                spread = f"{half:.{column.decimals}f}" if half else ""
                cells.append(TableCell(f"{float(text) - float(published):+.{column.decimals}f}", spread))
        mark = self.notes.mark(
            "Measured minus published; ± 95 % interval of the measured value, if its error is known."
        )
        return TableEntry(line.label, "difference", printed.model, (mark,), tuple(cells))


def half_width(row: Cells, key: str) -> float:
    """Half the 95 % interval of a column, by Student's t over images, over timed pairs for a speed-up in seconds, or
    over seeds for a mean over seeds; 0 without an error."""
    if between := row.get(spread_of(key)):
        seeds = int(row["seeds"])
        return half_interval(seeds, float(between) / math.sqrt(seeds))
    error = float(row.get(stderr_of(key)) or 0)
    if not error:
        return 0.0
    measured = timed_row(row) if key in TIMED_COLUMNS else row
    pairs = measured.get("timed_pairs") if key in SPEEDUPS else ""
    return half_interval(int(pairs or measured.get("n") or measured["images"]), error)


def _same_drafter(row: Cells, printed: PublishedRow) -> bool:
    """Whether a run had the drafter of a published row, where a paper has several targets that draft."""
    ours = row.get("drafter_weights", "").removeprefix("official:") or next(iter(DRAFTERS.values()))
    return printed.drafter_model in ("", ours)


def _new_metrics(rows: Mapping[str, Cells | None]) -> list[Column]:
    """Columns of metrics that some rows have and no paper's table names, such as a metric that was added later. A
    paper's metric is shown only in the tables in which the paper prints it."""
    papers = {column.key for table in TABLES.values() for column in table.columns}
    present = {name for row in rows.values() if row is not None for name, text in row.items() if text}
    return [row_column(name) for name in parameters.found_choices().columns if name in present - papers]


def _said(column: Column, valued: Sequence[Cells]) -> list[str]:
    """The remarks of rows on their values of a column: each once for all lines, a number that differs as a range."""
    alike: dict[tuple[Any, ...], list[Remark]] = {}
    for remark in (r for row in valued for r in remarks_of(row) if r.column == column.key):
        alike.setdefault(remark_text.kind(remark), []).append(remark)
    said = []
    for same in alike.values():
        count = "" if len(same) == len(valued) else f" ({len(same)} of {len(valued)} lines)"
        said.append(remark_text.common(same) + count)
    return said


def doubts(table: Table, rows: Mapping[str, Cells | None]) -> dict[tuple[str, str], str]:
    """(line key, column key) -> why these seconds cannot be compared with the others: another machine than the other
    lines', or a timing that is not valid."""
    timed = [c.key for c in table.columns if table.rows_of == "bench" or c.key in TIMED_COLUMNS]
    present = {name: timed_row(row) for name, row in rows.items() if row is not None}
    common = common_machine(present.values(), timed)
    found = {}
    for name, row in present.items():
        for key in timed:
            if row.get(key) and (why := doubt(row, key) or (elsewhere(row, key, common) if common else "")):
                found[name, key] = why
    return found


def comparable(table: Table, rows: Mapping[str, Cells | None]) -> dict[str, Cells | None]:
    """The rows without values in doubt, for what compares values without remarks, such as a curve."""
    kept = dict(rows)
    for name, key in doubts(table, rows):
        kept[name] = {**(kept[name] or {}), key: ""}
    return kept


def _tested(
    table: Table,
    test: TableTest,
    model: str,
    rows: Mapping[str, Cells | None],
    comparisons: Sequence[Cells],
    published: Sequence[PublishedRow],
) -> str:
    """The result of a test as a sentence, with the published results."""
    labels = {line.key: line.label for line in table.lines}
    text = f"{test.label}, {labels[test.line]} minus {labels[test.other]}: "
    result = compared_row(test, rows, comparisons)
    if result is None:
        text += "not measured yet"
    elif not result["p"]:
        text += f"measured ({model}) {float(result['difference']):+.3f} in each of {result['pairs']} pairs of images"
    else:
        p = f"p = {float(result['p']):.2g}" if float(result["p"]) > 0 else "p < 1e-300"
        if int(result["tests"]) > 1:
            p += f" ({float(result['p_holm']):.2g} by Holm's adjustment over {result['tests']} tests)"
        p += f", over {result['pairs']} pairs of the same prompt"
        if test.statistic == "distribution":
            text += f"measured ({model}) energy distance {float(result['test_statistic']):.3g}, {p}"
        else:
            half = (float(result["high"]) - float(result["low"])) / 2
            decimals = max(3, -math.floor(math.log10(half))) if half > 0 else 3
            low, high, difference = (f"{float(result[name]):+.{decimals}f}" for name in ("low", "high", "difference"))
            text += f"measured ({model}) {difference} (95 % interval {low} to {high}), "
            text += f"paired t({result['df']}) = {float(result['test_statistic']):.2f}, {p}"
    printed: dict[str, list[str]] = {}
    for row in published if test.statistic == "accepted_length" else ():
        sign = {"t_statistic": "t = ", "p_value_upper_bound": "p < "}.get(row.cells.get("value_name", ""))
        if sign:
            printed.setdefault(row.model, []).append(sign + row.cells["value"])
    return "; ".join([text, *(f"published ({name}) {', '.join(texts)}" for name, texts in printed.items())]) + "."


def facts(rows: Sequence[Cells]) -> tuple[tuple[str, str], ...]:
    """The provenance of the measured rows, and of their seconds if other runs measured them."""
    about = dict(_facts(rows))
    seconds = dict(_facts([timed for row in rows if (timed := timed_row(row)) is not row]))
    of_seconds = [seconds[label] for label in _OF_SECONDS if label in seconds]
    if of_seconds in ([], [about.get(label) for label in _OF_SECONDS if label in seconds]):
        return tuple(about.items())
    return (*about.items(), ("Seconds", "; ".join(of_seconds)))


def _facts(rows: Sequence[Cells]) -> tuple[tuple[str, str], ...]:
    """Each distinct value of each provenance column, in order."""
    facts = []
    for label, names in _PROVENANCE:
        parts = []
        for name in names:
            values = list(dict.fromkeys(r[name] for r in rows if r.get(name)))
            if values:
                parts.append(("" if name in _WITHOUT_NAME else f"{name} ") + " / ".join(values))
        if parts:
            facts.append((label, ", ".join(dict.fromkeys(parts))))
    dates = sorted(r["time"][:10] for r in rows if r.get("time"))
    if dates:
        facts.append(("Date", dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"))
    return tuple(facts)


# --- the arrangement for readers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrintedTable:
    """A sheet without the lines and columns that are empty throughout. Its remarks say what was left out, and why.
    names: how many of its columns, from the first on, name a line, such as its method."""

    names: int
    headers: tuple[Header, ...]
    lines: tuple[tuple[TableCell, ...], ...]
    notes: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]


#: The number of names, the headers, and the lines.
_Columns = tuple[int, list[Header], list[tuple[TableCell, ...]]]


def printed(sheet: TableSheet) -> PrintedTable:
    """Arranges a sheet: the values of a method are in one line if the paper has few models, else in one line per model.
    The marks of the notes follow the order of reading."""
    notes = Notes({text: mark for mark, text in sheet.notes})
    published = [e for e in sheet.entries if e.kind == "published"]
    entries = [e for e in sheet.entries if e.kind == "measured" or _has_value(e.cells)]
    remarks: list[str] = []
    if len({e.model for e in published if _has_value(e.cells)}) <= SIDE_BY_SIDE:
        names, headers, lines = _side_by_side(sheet, notes)
        kind = "Lines"
    else:
        names, headers, lines = _one_below_the_other(sheet.headers, entries)
        kind = "Measured lines"
        if absent := sum(not _has_value(e.cells) for e in published):
            remarks.append(f"Published lines without any value are left out: {absent}.")
    texts = {mark: text for text, mark in notes.marks.items()}

    # Leave out lines and columns without any value.
    filled = [line for line in lines if _has_value(line[names:])]
    remarks += _left_out(kind, [(line[0].value, line) for line in lines if line not in filled], texts)
    columns = [[line[i] for line in filled] for i in range(len(headers))]
    shown = [i for i, cells in enumerate(columns) if i < names or _has_value(cells)]
    empty = [(headers[i].title, cells) for i, cells in enumerate(columns) if filled and i not in shown]
    remarks += _left_out("Columns", empty, texts)

    # Number the marks in the order of reading: headers, then line by line.
    order = Notes()

    def marks(old: Iterable[str]) -> tuple[str, ...]:
        return tuple(mark if mark == DIFFERS else order.mark(texts[mark]) for mark in old)

    printed_headers = []
    for i in shown:
        header = headers[i]
        printed_headers.append(replace(header, marks=marks(header.marks), source_marks=marks(header.source_marks)))
    printed_lines = []
    previous: tuple[TableCell, ...] = ()
    for line in filled:
        first = TableCell() if line[:1] == previous[:1] else line[0]  # a method is named once
        cells = [first, *(line[i] for i in shown[1:])]
        printed_lines.append(tuple(replace(cell, marks=marks(cell.marks)) for cell in cells))
        previous = line
    star = [(DIFFERS, texts[DIFFERS])] if DIFFERS in texts else []
    return PrintedTable(
        names, tuple(printed_headers), tuple(printed_lines), (*order.all(), *star), (*remarks, *sheet.remarks)
    )


def _side_by_side(sheet: TableSheet, notes: Notes) -> _Columns:
    """One line for each method, with a column for each source of a value. A mark of all entries of a source is in the
    header."""
    # The entries of each method, by source: a measured entry, then those that belong to it.
    methods: list[dict[str, TableEntry]] = []
    for e in sheet.entries:
        if e.kind == "measured":
            methods.append({})
        methods[-1][_source(e)] = e
    by_source: dict[str, list[TableEntry]] = {"measured": []}
    for method in methods:
        for source, e in method.items():
            by_source.setdefault(source, []).append(e)
    shared = {source: _shared_marks(group) for source, group in by_source.items()}

    # The columns: each header for every source that has a value under it.
    columns = []
    for i in range(len(sheet.headers)):
        for source, group in by_source.items():
            if source == "measured" or _has_value(e.cells[i] for e in group):
                columns.append((i, source))
    single = all(source == "measured" for _, source in columns)
    several = len({e.model for e in by_source["measured"]}) > 1
    headers = [Header("Method", "", shared["measured"])]
    if several:
        headers.append(Header("Model", "", ()))
    names = len(headers)
    for i, source in columns:
        of = () if source == "measured" else shared[source]
        headers.append(replace(sheet.headers[i], source="" if single else source, source_marks=of))
    lines = []
    for method in methods:
        measured = method["measured"]
        line = [TableCell(measured.method, marks=_without(measured.marks, shared["measured"]))]
        if several:
            line.append(TableCell(measured.model))
        for i, source in columns:
            entry = method.get(source)
            if entry is None:
                line.append(notes.gap(_NOT_PRINTED if source.startswith("published") else _NO_DIFFERENCE))
            elif source == "measured":
                line.append(replace(entry.cells[i], bold=not single))
            else:
                own = _without(entry.marks, shared[source]) if entry.cells[i].value else ()
                line.append(replace(entry.cells[i], marks=(*own, *entry.cells[i].marks)))
        lines.append(tuple(line))
    return names, headers, lines


def _source(entry: TableEntry) -> str:
    """The source of an entry's values, in the header of a column."""
    if entry.kind == "measured":
        return "measured"
    return f"{'measured minus ' if entry.kind == 'difference' else ''}published for {entry.model}"


def _shared_marks(entries: Sequence[TableEntry]) -> tuple[str, ...]:
    """The marks that all of these entries have, apart from those without any value."""
    marks = [e.marks for e in entries if _has_value(e.cells)]
    return tuple(mark for mark in marks[0] if all(mark in others for others in marks)) if marks else ()


def _without(marks: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    return tuple(mark for mark in marks if mark not in others)


def _one_below_the_other(headers: Sequence[Header], entries: Sequence[TableEntry]) -> _Columns:
    """One line for each entry, which names its source."""
    lines = []
    for e in entries:
        bold = e.kind == "measured"
        source = TableCell(f"{e.kind}, {e.model}", marks=e.marks, bold=bold)
        lines.append((TableCell(e.method), source, *(replace(cell, bold=bold) for cell in e.cells)))
    return 2, [Header("Method", "", ()), Header("Source", "", ()), *headers], lines


def _has_value(cells: Iterable[TableCell]) -> bool:
    return any(cell.value for cell in cells)


def _left_out(what: str, empty: Iterable[tuple[str, Iterable[TableCell]]], texts: Mapping[str, str]) -> Iterator[str]:
    """Names the lines or columns without any value, with the notes of their cells."""
    names: dict[str, list[str]] = {}  # by reason
    for name, cells in empty:
        reason = " ".join(dict.fromkeys(texts[mark] for cell in cells for mark in cell.marks))
        names.setdefault(reason, []).append(name)
    for reason, group in names.items():
        yield f"{what} without any value are left out: {'; '.join(group)}. {reason}"
