"""A sheet as Markdown, LaTeX (booktabs) and CSV, with all text escaped, and its files: one per format, and the figures
of its rows."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from specbench.errors import UsageError, unknown
from specbench.storage.files import write_atomically
from specbench.tables import figures, filled, layout, matched
from specbench.tables.layout import Header, PrintedTable, TableCell, TableSheet
from specbench.tables.table_runs import TablePlan

#: The labels of the lines above a table.
_PROVENANCE = (
    ("Paper", "Command"),
    ("Device", "Software", "Commit", "Date"),
    ("Seconds",),
    ("Model", "Sampling", "Prompts"),
)
_ARROWS = {"higher": " ↑", "lower": " ↓", "": ""}
_LATEX = {
    "\\": r"\textbackslash{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "–": "--",
    "—": "---",
    "±": r"$\pm$",
    "×": r"$\times$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    **{
        letter: rf"$\{name}$"
        for letter, name in zip("αγδελντω", "alpha gamma delta epsilon lambda nu tau omega".split())
    },
}


def markdown_text(text: str) -> str:
    """Plain text made safe inside a Markdown table cell."""
    return re.sub(r"([\\|*_<>`\[\]])", r"\\\1", " ".join(text.split()))


def latex_text(text: str) -> str:
    """Plain text made safe for LaTeX; two hyphens in a row stay two hyphens."""
    text = " ".join(text.split())
    return "".join("-{}" if c == "-" and text[i + 1 : i + 2] == "-" else _LATEX.get(c, c) for i, c in enumerate(text))


def markdown(sheet: TableSheet) -> str:
    """The sheet as a Markdown document: provenance, the table, its notes, and the commands of the lines."""
    table = layout.printed(sheet)
    out = [
        f"# {markdown_text(sheet.title)}",
        "",
        *(f"- {text}" for text in _provenance(sheet, markdown_text, _code)),
        "",
    ]
    if table.lines:
        out.append(_line([f"{markdown_text(h.label)}{_ARROWS[h.better]}{_of(h)}" for h in table.headers]))
        out.append(_line(["---"] * table.names + ["---:"] * (len(table.headers) - table.names)))
        for line in table.lines:
            out.append(_line([_markdown_cell(cell, "" if i < table.names else "—") for i, cell in enumerate(line)]))
        out += ["", *[f"- <sup>{m}</sup> {markdown_text(text)}" for m, text in table.notes], ""]
    out += [f"{markdown_text(text)}\n" for text in table.remarks]
    if sheet.commands:
        out += [f"<details><summary>Commands of the runs: {len(sheet.commands)}</summary>", ""]
        out += [f"- {markdown_text(label)}: {_code(command)}" for label, command in sheet.commands]
        out += ["", "</details>"]
    return "\n".join(out).rstrip() + "\n"


def _provenance(sheet: TableSheet, escaped: Callable[[str], str], code: Callable[[str], str]) -> Iterator[str]:
    """The lines above a table: its paper, the machine of its values, and what they measure."""
    facts = {"Paper": sheet.paper, **dict(sheet.facts)}
    for labels in _PROVENANCE:
        known = [label for label in labels if facts.get(label)]
        if known:
            yield " ".join(
                f"{label}: {code(facts[label]) if label == 'Command' else escaped(facts[label])}." for label in known
            )


def _of(header: Header) -> str:
    """The source of a column's values in Markdown, with all marks of the header."""
    source = f", {markdown_text(header.source)}" if header.source else ""
    return source + _markdown_marks((*header.marks, *header.source_marks))


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _markdown_marks(marks: tuple[str, ...]) -> str:
    return f"<sup>{','.join(marks)}</sup>" if marks else ""


def _markdown_cell(cell: TableCell, missing: str) -> str:
    text = markdown_text(cell.value) or missing
    text += (f" ± {markdown_text(cell.spread)}" if cell.spread else "") + _markdown_marks(cell.marks)
    return f"**{text}**" if cell.bold and cell.value else text


def latex(sheet: TableSheet) -> str:
    r"""The sheet as a LaTeX table (needs `booktabs`, `graphicx` and `textcomp`, with T1 fonts). The commands of the
    lines are comments."""
    table = layout.printed(sheet)
    label = re.sub(r"[^A-Za-z0-9:.-]", "-", sheet.id)
    small = [rf"\textsuperscript{{{m}}} {latex_text(text)}" for m, text in table.notes]
    small += [*map(latex_text, table.remarks), *_provenance(sheet, latex_text, _latex_code)]
    return "\n".join(
        [
            r"% \usepackage[T1]{fontenc} \usepackage{booktabs,graphicx,textcomp}",
            r"\begin{table*}",
            r"\centering",
            rf"\caption{{{latex_text(sheet.title)} ({latex_text(sheet.paper)}).}}",
            rf"\label{{tab:{label}}}",
            *(_latex_table(table) if table.lines else []),
            "",
            r"\medskip",
            r"\begin{minipage}{\textwidth}\footnotesize\raggedright",
            " \\\\\n".join(small),
            r"\end{minipage}",
            r"\end{table*}",
            *(f"% {' '.join(label.split())}: {' '.join(command.split())}" for label, command in sheet.commands),
            "",
        ]
    )


def _latex_table(table: PrintedTable) -> Iterator[str]:
    names, grouped = table.names, any(not line[0].value for line in table.lines)
    yield r"\resizebox{\textwidth}{!}{%"
    yield rf"\begin{{tabular}}{{{'l' * names}{'r' * (len(table.headers) - names)}}}"
    yield from (r"\toprule", *_latex_head(table), r"\midrule")
    for i, line in enumerate(table.lines):
        if grouped and i and line[0].value:
            yield r"\addlinespace"
        yield _latex_line([_latex_cell(cell, "" if k < names else "---") for k, cell in enumerate(line)])
    yield from (r"\bottomrule", r"\end{tabular}%", "}")


def _latex_head(table: PrintedTable) -> list[str]:
    """The line of labels, over the line of their sources if the columns have these."""
    labels: list[str] = []
    rules: list[str] = []
    sources: list[str] = []
    at = 1
    for _, group in itertools.groupby(table.headers, lambda h: (h.label, h.marks)):
        first, *more = columns = list(group)
        text = f"{latex_text(first.label + _ARROWS[first.better])}{_latex_marks(first.marks)}"
        labels.append(rf"\multicolumn{{{len(columns)}}}{{c}}{{{text}}}" if more else text)
        rules += [rf"\cmidrule(lr){{{at}-{at + len(more)}}}"] if more else []
        sources += map(_latex_source, columns)
        at += len(columns)
    return [_latex_line(labels), *rules, *([_latex_line(sources)] if any(sources) else [])]


def _latex_source(header: Header) -> str:
    """The source of a column's values, in two lines if it names a model."""
    lines = r"\\ for ".join(map(latex_text, header.source.split(" for ", 1)))
    return rf"\shortstack[r]{{{lines}}}{_latex_marks(header.source_marks)}" if lines else ""


def _latex_line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_marks(marks: tuple[str, ...]) -> str:
    return rf"\textsuperscript{{{','.join(marks)}}}" if marks else ""


def _latex_code(text: str) -> str:
    return rf"\texttt{{{latex_text(text)}}}"


def _latex_cell(cell: TableCell, missing: str) -> str:
    value = re.sub(r"^-", r"$-$", cell.value)  # a minus sign, not a hyphen
    text = (value if value != cell.value else latex_text(value)) if cell.value else missing
    text += (rf" $\pm$ {latex_text(cell.spread)}" if cell.spread else "") + _latex_marks(cell.marks)
    return rf"\textbf{{{text}}}" if cell.bold and cell.value else text


def as_csv(sheet: TableSheet) -> str:
    """The sheet in long form, one line per cell, with values as printed. A missing cell is empty, and its note says
    why."""
    notes = dict(sheet.notes)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "method", "kind", "model", "row_id", "evidence", "column", "value", "spread", "note"])
    for e in sheet.entries:
        for header, cell in zip(sheet.headers, e.cells, strict=True):
            note = " ".join(notes[mark] for mark in (*e.marks, *cell.marks))
            entry = [sheet.id, e.method, e.kind, e.model, e.row_id, e.evidence]
            writer.writerow([*entry, header.label, cell.value, cell.spread, note])
    return out.getvalue()


FORMATS: dict[str, tuple[str, Callable[[TableSheet], str]]] = {
    "md": ("md", markdown),
    "latex": ("tex", latex),
    "csv": ("csv", as_csv),
}


def formats(text: str) -> list[str]:
    """The formats that a command line names. UsageError for an unknown one, and for an empty list."""
    names = list(dict.fromkeys(f.strip() for f in text.split(",") if f.strip()))
    for name in names:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    if not names:
        raise UsageError(f"--format names no format (choose from: {', '.join(FORMATS)})")
    return names


# --- files ------------------------------------------------------------------------------------------------------------


def files(
    todo: TablePlan, command: str, folder: Path, formats: Sequence[str], stem: str = "", cells: str = ""
) -> tuple[TableSheet, Iterator[Path]]:
    """The sheet of a plan, and its files and figures, each of which is written when the iterator comes to it. command:
    fills the table; stem: of the files' names, default: the table and its model; cells: the name of the CSV file."""
    stem = stem or (todo.table.id if todo.model == todo.table.model else f"{todo.table.id}.{todo.model}")
    if todo.table.matched and not todo.suite.baseline:
        drawn = matched.build(todo, command)
    else:
        drawn, table, rows = filled.build(todo, command)

    def written() -> Iterator[Path]:
        for name in formats:
            ending, renderer = FORMATS[name]
            path = folder / (cells if cells and name == "csv" else f"{stem}.{ending}")
            write_atomically(path, renderer(drawn).encode())
            yield path
        if todo.table.matched and not todo.suite.baseline:
            yield from matched.draw(todo, folder, stem)
        elif table.figure and any(rows.values()):
            yield from figures.draw(table, rows, folder, stem)

    return drawn, written()
