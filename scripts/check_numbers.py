"""Computes the numbers that documents state again from the rows in results/, and fails where one differs or has no row,
where it rests on too few images, and where a row is of another commit than the one that results/ names.

python scripts/check_numbers.py            # check
python scripts/check_numbers.py --write    # put today's values into the sentences; read what changed before you commit

`results/numbers.yaml` has, by document, sentences (`says`), in which each `{}` is a number and each entry of `of` the
expression that it comes from, or `of` is one expression of all of them, as of a table's cells; other numbers of a
sentence are settings that its author vouches for. `holds` has expressions that must be true where the sentence depends
on more than its numbers. Tables that a comment names (`doc_tables`) are drawn from rows and count as a whole. A number
outside of all this is an error, save in code, links, dates and names.

Of other documents, and of those that its entry `rows` calls `partly` covered, other numbers are left alone.

`rows` names the `commit` that all rows under results/ are from, and by file what is excepted (`except`): a reason, or
{commit, reason} where the file also has rows of a later commit; without a commit, any will do. `least`, there and of a
sentence: the least `n`, or `samples`, of the rows that a sentence rests on.

Expressions know `rows(NAME, column=value, ...)`, the rows of results/NAME.csv (or of published/NAME) as a DataFrame,
`line(TABLE, KEY)`, the row that a line of a table shows, `apart(TABLE, Y, LEFT, RIGHT)`, the ends of the 95 % interval
of what the line RIGHT has more than LEFT, from both standard errors and not paired, `pairs(TABLE, column=value, ...)`,
the pairs of its curves, each also with `adjusted`, its p by Holm's adjustment over all of the table, and `above` and
`below`, where the band of the pair excludes 0 (`matched.stretches`), and `curves(TABLE, PANEL, Y, VALUE)`, by label, y
of the curves of a panel where the figure's x has this value (`doc_tables.curves_at`).
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import doc_tables
import pandas as pd
import yaml

from specbench.cli.commands import fail
from specbench.errors import UsageError
from specbench.tables import catalog, matched, measure

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "specbench/tables/published"
_SIZES = ("n", "samples")
_FIGURE = r"[-−+]?\d+(?:,\d{3})*(?:\.\d+)?"
_NUMBER = re.compile(rf"(?<![\w.\-]){_FIGURE}(?!\w)")
_HOLE = rf"({_FIGURE}(?:e[-+]?\d+)?|[0-9a-f]{{7,40}})(?!\w)"
#: What is no measurement: code, targets of links, comments, dates, headings, numbers of items and equations, names.
_ASIDES = (
    r"```.*?```",
    r"^ {4,}\S[^\n]*$",
    r"`[^`\n]*`",
    r"\]\([^)]*\)",
    r"<!--.*?-->",
    r"\b\d{4}-\d\d-\d\d\b",
    r"^#+ [^\n]*$",
    r"^\d+\. ",
    r"\b(?:Eqs?\.|Table|Fig\.?|Appendix|Algorithm) \d+(?:, \d+)*",
    r"\bLumina-mGPT 2\b",
)
_ASIDE = re.compile("|".join(_ASIDES), re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Problem:
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Rows:
    """What expressions see of `results`."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.read = cache(self._read)
        self.plan, self.lines = cache(self._plan), cache(self._lines)
        self.sizes: list[tuple[str, str, float]] = []  # of the rows asked for: where, "n" or "samples", how many

    def names(self) -> dict[str, Any]:
        builtins = {f.__name__: f for f in (abs, all, len, max, min, sum, zip)}
        return {
            "rows": self.rows,
            "line": self.line,
            "pairs": self.pairs,
            "apart": self.apart,
            "curves": self.curves,
            "loads": json.loads,
            "exp": math.exp,
            "mean": fmean,
            **builtins,
        }

    def rows(self, name: str, **where: Any) -> pd.DataFrame:
        found = self.read(name)
        for column, value in where.items():
            found = found[found[column] == value]
        if found.empty:
            raise UsageError(f"results/{name}.csv has no row with {where}")
        if not _is_published(name):
            self.sizes += [(name, size, found[size].min()) for size in _SIZES if size in found]
        return found

    def line(self, table: str, key: str) -> Mapping[str, Any]:
        found = self.lines(table)
        if key not in found:
            raise UsageError(f"table {table} has no row for its line {key} (lines: {', '.join(found)})")
        row = found[key]
        self.sizes += [(f"{table}, line {key}", size, row[size]) for size in _SIZES if row.get(size)]
        return row

    def pairs(self, table: str, **where: Any) -> list[SimpleNamespace]:
        found = chain.from_iterable(matched.adjusted_pairs(self.plan(table)).values())
        some = [_pair(row, p) for row, p in found]
        some = [one for one in some if all(getattr(one, k) == v for k, v in where.items())]
        if not some:
            raise UsageError(f"results/{table}_pairs.csv has no pair with {where}")
        self.sizes += [(f"{table}, {one.panel}", "n", one.prompts) for one in some]
        return some

    def apart(self, table: str, y: str, left: str, right: str) -> tuple[float, float]:
        """The 95 % interval of what `right` has more of y than `left`, of images as if they were not paired."""
        a, b = self.line(table, left), self.line(table, right)
        difference, wide = b[y] - a[y], 1.96 * math.hypot(a[f"{y}_stderr"], b[f"{y}_stderr"])
        return difference - wide, difference + wide

    def curves(self, table: str, panel: str, y: str, value: float) -> dict[str, float]:
        found = doc_tables.curves_at(self.plan(table), panel, y, value)
        return {label: at for label, at in found.items() if at is not None}

    def panels(self, table: str) -> set[str]:
        """What identifies the runs of a table's panels, of which pairs of curves are tested."""
        return set(self.plan(table).equal)

    def _read(self, name: str) -> pd.DataFrame:
        folder = PUBLISHED.parent if _is_published(name) else self.results
        return pd.read_csv(folder / f"{name}.csv", low_memory=False)

    def _lines(self, table: str) -> dict[str, dict[str, Any]]:
        rows = self.plan(table).rows.items()
        return {key: {k: _number(v) for k, v in row.items()} for key, row in rows if row is not None}

    def _plan(self, table: str) -> measure.TablePlan:
        if table not in catalog.TABLES:
            raise UsageError(f"there is no table {table}")
        found = catalog.TABLES[table]
        return measure.plan(found, found.model, None, self.results)


def check(
    document: str,
    claims: Sequence[Mapping[str, Any]],
    rows: Rows,
    where: str,
    least: Mapping[str, int] | None = None,
    whole: bool = True,
) -> tuple[list[Problem], str]:
    """What is wrong with the numbers of `document`, and the document with the values of its rows. `least`: the least
    `n` and `samples` of rows, where a sentence has none of its own. whole: a number outside of all this is wrong."""
    problems, taken, changes = [], [], []
    for one in doc_tables.tables(document):
        taken.append(one.span)
        text = doc_tables.draw(one, rows.plan(one.table))
        if text != one.drawn:
            problems.append(Problem(where, f"the table of {one.table} is not that of its rows: draw it with --write"))
            changes.append((*one.span, text))
    for claim in claims:
        says = claim["says"]
        rows.sizes.clear()
        values = _values(claim.get("of", []), rows)
        found = list(re.finditer(_pattern(says), document))
        if len(found) != 1 or len(values) != says.count("{}"):
            times = "once" if len(found) == 1 else f"{len(found)} times"
            problems.append(
                Problem(where, f"{says!r} is there {times}, and has {len(values)} of {says.count('{}')} expressions")
            )
            continue
        taken.append(found[0].span())
        for number, (expression, value) in enumerate(values, 1):
            printed = found[0].group(number)
            shown = as_printed(value, printed)
            if shown != printed:
                problems.append(Problem(where, f"{printed} should be {shown} ({expression}) in {says!r}"))
                changes.append((*found[0].span(number), shown))
        for expression in claim.get("holds", []):
            if not _evaluated(expression, rows):
                problems.append(Problem(where, f"{says!r} does not hold: {expression}"))
        for size, wanted in {**(least or {}), **claim.get("least", {})}.items():
            count, source = min(((n, source) for source, of, n in rows.sizes if of == size), default=(wanted, ""))
            if count < wanted:
                problems.append(Problem(where, f"{says!r} rests on {size}={count:g} of {source}, below {wanted}"))
    taken += [found.span() for found in _ASIDE.finditer(document)]
    for found in _NUMBER.finditer(document) if whole else ():
        if not any(start <= found.start() < end for start, end in taken):
            line = document.count("\n", 0, found.start()) + 1
            problems.append(Problem(f"{where}:{line}", f"{found.group()} has no row: add its sentence to numbers.yaml"))
    for start, end, shown in sorted(changes, reverse=True):
        document = document[:start] + shown + document[end:]
    return problems, document


def check_commit(rows: Rows, commit: str, exceptions: Mapping[str, str | Mapping[str, str]]) -> list[Problem]:
    """What under results/ is not of `commit`, or was made of rows that are not there: rows by their own commit, tests
    by the runs that they compare, drawn tables by the commits that they print. `exceptions`: files -> why not, or the
    `commit` that some of their rows have instead."""
    results = rows.results
    files = {path.relative_to(results) for kind in ("*.csv", "tables/*.md") for path in results.rglob(kind)}
    excepted = {pattern: {path for path in files if path.match(pattern)} for pattern in exceptions}
    unused = [pattern for pattern, some in excepted.items() if not some]
    problems = [Problem("results/numbers.yaml", f"excepts {pattern}, and there is no such file") for pattern in unused]
    later = {name: str(of["commit"]) for name, of in exceptions.items() if isinstance(of, Mapping)}
    checked = sorted(files - set().union(*(some for name, some in excepted.items() if name not in later)))
    as_text = {"dtype": str, "keep_default_na": False}
    tables = {path: pd.read_csv(results / path, **as_text) for path in checked if path.suffix == ".csv"}
    runs = {run for table in tables.values() if "run_id" in table for run in table["run_id"]}
    for path in checked:
        also = [other for name, other in later.items() if path in excepted[name]]
        if path.suffix == ".md":
            found = re.findall(r"\b[0-9a-f]{40}(?:-dirty)?", (results / path).read_text(encoding="utf-8"))
            foreign = _foreign(found, commit, also)
        elif "commit" in tables[path]:
            foreign = _foreign(tables[path]["commit"], commit, also)
        elif {"run_a", "run_b"} <= set(tables[path]):
            foreign = {*tables[path]["run_a"], *tables[path]["run_b"]} - runs
        elif "runs" in tables[path]:
            foreign = set(tables[path]["runs"]) - rows.panels(path.stem.removesuffix("_pairs"))
        else:
            foreign = {"a file that names none"}
        if foreign:
            others = ", ".join(sorted(one or "none" for one in foreign)[:3])
            problems.append(Problem(f"results/{path}", f"is not of commit {commit} alone: {others}"))
    return problems


def _foreign(found: Iterable[str], commit: str, also: Sequence[str]) -> set[str]:
    """Those of neither `commit` nor a later one; and each later one that none is of."""
    found = set(found)
    unused = {f"{one}, of which it has no row" for one in also if not any(map(partial(_is, commit=one), found))}
    return {one for one in found if not any(_is(one, allowed) for allowed in (commit, *also))} | unused


def _is(found: str, commit: str) -> bool:
    return found.startswith(commit) and "-" not in found


def as_printed(value: Any, printed: str) -> str:
    """`value` with as many digits as `printed` has, and its sign and separators; a commit as long as there."""
    if isinstance(value, str):
        return value[: len(printed)]
    number = printed.lstrip("+-−").replace(",", "")
    if "e" in number:
        text = f"{abs(value):.{len(number.partition('e')[0].partition('.')[2])}e}"
        text = re.sub(r"e([-+])0?", lambda sign: f"e{sign.group(1).strip('+')}", text)
    else:
        text = f"{abs(value):{',' if ',' in printed else ''}.{len(number.partition('.')[2])}f}"
    minus = "−" if "−" in printed else "-"
    return (minus if value < 0 else "+" if printed.startswith("+") else "") + text


def _pattern(says: str) -> str:
    parts = (r"\s+".join(re.escape(word) for word in part.split(" ")) for part in " ".join(says.split()).split("{}"))
    return _HOLE.join(parts)


def _values(of: str | Sequence[str], rows: Rows) -> list[tuple[str, Any]]:
    """The expressions with their values; one expression of all values is named with each."""
    if isinstance(of, str):
        return [(of, value) for value in _evaluated(of, rows)]
    return [(one, _evaluated(one, rows)) for one in of]


def _evaluated(expression: str, rows: Rows) -> Any:
    try:
        return eval(expression, {"__builtins__": {}, **rows.names()})  # noqa: S307 (the repository's own file)
    except (KeyError, AttributeError, SyntaxError, TypeError, NameError, ValueError, OSError) as error:
        raise UsageError(f"results/numbers.yaml: {expression}: {type(error).__name__}: {error}") from error


def read_claims(file: Path) -> dict[str, Any]:
    """Document -> its claims, and `rows` -> what is asked of the rows. UsageError: it is not that."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UsageError(f"{file.name} is not YAML: {' '.join(str(error).split())}. Mend that line.") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file.name} has no documents. Write `DOCUMENT:`, and its sentences below it.")
    for name, claims in found.items():
        whole = isinstance(claims, dict) if name == "rows" else isinstance(claims, list)
        if not whole or (name != "rows" and not all(isinstance(one, dict) and "says" in one for one in claims)):
            raise UsageError(f"{file.name}: {name} is no list of sentences. Begin each with `- says:`.")
    return found


def _is_published(name: str) -> bool:
    return name.startswith(PUBLISHED.name)


def _pair(row: Mapping[str, str], adjusted: float) -> SimpleNamespace:
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for low, high, above in matched.stretches(row):
        spans[above].append((low, high))
    known = {k: _number(v) for k, v in row.items()}
    return SimpleNamespace(**known, adjusted=adjusted, above=spans[True], below=spans[False])


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def main(argv: Sequence[str] | None = None) -> int:
    write = "--write" in (sys.argv[1:] if argv is None else argv)
    rows = Rows(ROOT / "results")
    documents = read_claims(ROOT / "results/numbers.yaml")
    about = documents.pop("rows", {})
    commit = about.get("commit")
    problems = check_commit(rows, str(commit), about.get("except", {})) if commit else []
    partly = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")} - set(documents)
    partly |= set(about.get("partly", []))
    for name in sorted({*documents, *partly}):
        path = ROOT / name
        before, claims = path.read_text(encoding="utf-8"), documents.get(name, [])
        found, text = check(before, claims, rows, name, about.get("least"), name not in partly)
        problems += found
        if write and text != before:
            path.write_text(text, encoding="utf-8")
    print("\n".join(map(str, problems)) or "every number has its row")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(fail(error, 2))
