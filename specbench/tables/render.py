"""A sheet as Markdown, LaTeX (booktabs) and CSV, with all text escaped, and its files: one per format, and the figures
of its rows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from specbench.errors import UsageError, unknown
from specbench.storage.files import write_atomically
from specbench.tables import figures, filled, matched
from specbench.tables.layout import TableCell, TableSheet
from specbench.tables.table_runs import TablePlan

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
    "δ": r"$\delta$",
    "λ": r"$\lambda$",
    "ν": r"$\nu$",
    "ω": r"$\omega$",
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
    mark = _markdown_marks
    out = [f"# {markdown_text(sheet.title)}", ""]
    out += [f"- Paper: {markdown_text(sheet.paper)}"]
    out += [f"- {label}: {_code(text) if label == 'Command' else markdown_text(text)}" for label, text in sheet.facts]
    head = [f"{markdown_text(h.label)}{_ARROWS[h.better]}{mark(h.marks)}" for h in sheet.headers]
    out += ["", _line(["Method", "Source", *head]), _line(["---", "---", *["---:"] * len(head)])]
    previous = None
    for e in sheet.entries:
        source = f"{e.kind}, {markdown_text(e.model)}{mark(e.marks)}"
        cells = [_markdown_cell(c) for c in e.cells]
        if e.kind == "measured":
            source, cells = f"**{source}**", [f"**{c}**" if e.cells[i].value else c for i, c in enumerate(cells)]
        out.append(_line([markdown_text(e.method) if e.method != previous else "", source, *cells]))
        previous = e.method
    out += ["", *[f"- <sup>{m}</sup> {markdown_text(text)}" for m, text in sheet.notes]]
    out += ["", *[f"{markdown_text(text)}\n" for text in sheet.remarks]]
    out += ["The run of each measured line:", ""] if sheet.commands else []
    out += [f"- {markdown_text(label)}: {_code(command)}" for label, command in sheet.commands]
    return "\n".join(out).rstrip() + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _markdown_marks(marks: tuple[str, ...]) -> str:
    return f"<sup>{','.join(marks)}</sup>" if marks else ""


def _markdown_cell(cell: TableCell) -> str:
    text = markdown_text(cell.value) or "—"
    return text + (f" ± {markdown_text(cell.spread)}" if cell.spread else "") + _markdown_marks(cell.marks)


def latex(sheet: TableSheet) -> str:
    r"""The sheet as a LaTeX table (needs `booktabs`, `graphicx` and `textcomp`, with T1 fonts)."""
    head = [f"{latex_text(h.label + _ARROWS[h.better])}{_latex_marks(h.marks)}" for h in sheet.headers]
    lines = [r"\toprule", _latex_line(["Method", "Source", *head]), r"\midrule"]
    previous = None
    for e in sheet.entries:
        if previous not in (None, e.method):
            lines.append(r"\addlinespace")
        source = f"{e.kind}, {latex_text(e.model)}{_latex_marks(e.marks)}"
        method = latex_text(e.method) if e.method != previous else ""
        lines.append(_latex_line([method, source, *map(_latex_cell, e.cells)]))
        previous = e.method
    facts = " ".join(f"{latex_text(label)}: {latex_text(text)}." for label, text in sheet.facts)
    runs = " ".join(rf"{latex_text(label)}: \texttt{{{latex_text(command)}}}." for label, command in sheet.commands)
    label = re.sub(r"[^A-Za-z0-9:.-]", "-", sheet.id)
    small = [rf"\textsuperscript{{{m}}} {latex_text(text)}" for m, text in sheet.notes]
    small += [*map(latex_text, sheet.remarks), facts, runs]
    return "\n".join(
        [
            r"% \usepackage[T1]{fontenc} \usepackage{booktabs,graphicx,textcomp}",
            r"\begin{table*}",
            r"\centering",
            rf"\caption{{{latex_text(sheet.title)} ({latex_text(sheet.paper)}).}}",
            rf"\label{{tab:{label}}}",
            r"\resizebox{\textwidth}{!}{%",
            rf"\begin{{tabular}}{{ll{'r' * len(head)}}}",
            *lines,
            r"\bottomrule",
            r"\end{tabular}%",
            "}",
            "",
            r"\medskip",
            r"\begin{minipage}{\textwidth}\footnotesize\raggedright",
            " \\\\\n".join(text for text in small if text),
            r"\end{minipage}",
            r"\end{table*}",
            "",
        ]
    )


def _latex_line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_marks(marks: tuple[str, ...]) -> str:
    return rf"\textsuperscript{{{','.join(marks)}}}" if marks else ""


def _latex_cell(cell: TableCell) -> str:
    value = re.sub(r"^-", r"$-$", cell.value)  # a minus sign, not a hyphen
    text = (value if value != cell.value else latex_text(value)) if cell.value else "---"
    return text + (rf" $\pm$ {latex_text(cell.spread)}" if cell.spread else "") + _latex_marks(cell.marks)


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
