"""Fills the pages with numbers of the rows in results/: docs/templates/X.md -> X.md. Fails where a sentence no longer
holds, where a number rests on too few images, and where a row is of another commit than results/numbers.yaml names.

python scripts/pages.py            # check that the pages are what their templates give
python scripts/pages.py --write    # write them; read what changed before you commit

A slot of a template has a text and what computes its numbers:

    SJD takes {{ 88.1 ± 0.6 | pm(field['sjd'], 'steps') }} of 256 steps.

The n values of the expression replace the n numbers of the text, in their order. Each is printed in the format of the
number that it replaces: with as many digits, and with a sign or separators. `...` leaves a number as it is: its author
vouches for it. A truth value takes no number and must be true; a slot with truth values alone, `{{ | EXPRESSION }}`,
prints nothing. A slot on a line of its own without a text draws the table there: `{{ table('field', 'steps') }}`.
`{{ settings }}` prints nothing and says that the other numbers of its paragraph, list item or row of a table are
settings.

The pages that numbers.yaml calls `whole` have a slot in every paragraph, list item and row with a number, except
numbers in code, links, dates and names. numbers.yaml also has:

    commit   the commit of all rows
    except   file: a reason, or {commit, reason} if the file also has rows of a later commit
    few      files whose rows may have fewer images, or samples, than LEAST

Slots can use every table by its name, with its lines (`field['sjd'].steps`, see `Rows.names`), and:

    rows(NAME, column=value, ...)    the rows of results/NAME.csv (or of published/NAME) as a DataFrame; of a table's
                                     file, only its own models' rows, or with 'TABLE.MODEL' another model's rows
    one(NAME, column=value, ...)     the only such row: `one('drafters').n`
    lines('TABLE.MODEL')             the lines of a table with another model than its own; the name is also taken by
                                     `pairs`, `curves` and drawn tables
    card(STAGE)                      a stage's statistics in results/embedded_models.md
    get(LINE, Y, ...)                values of a line or of a row; '-steps' is the value with the other sign
    pm(LINE, Y)                      a value and its standard error
    estimate(VALUE, ERROR, N)        the same of other numbers, with the number of images that the error rests on
    ends(VALUES)                     the least and the largest
    apart(Y, LEFT, RIGHT)            the ends of the 95 % interval of the difference RIGHT - LEFT of two lines, from
                                     both standard errors, not paired: Welch's, by Student's t
    z(LEFT, RIGHT)                   the normal deviate with the p-value of that test, of two values with their errors:
                                     beyond 1.96 for p < 0.05, beyond 3.29 for p < 0.001
    rank_correlation(XS, YS)         Spearman's, and the ends of its 95 % interval
    verdict(ROWS)                    the audit's verdict over all these rows together
    pairs(TABLE, column=value, ...)  the pairs of its curves. p: of the ratio, if there is one; each also with
                                     `adjusted`, its p by Holm's adjustment over all of the table, and `above` and
                                     `below`, where the band of the pair excludes 0
    planned_pairs(TABLE)             how many pairs the adjustment is over
    curves(TABLE, PANEL, Y, X)       by label, Y of the curves of a panel where the figure's x is X

the tables of `doc_tables`, and the `names` of numbers.yaml: expressions that several slots share.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import doc_tables
import numpy as np
import pandas as pd
import yaml
from scipy.special import ndtri, stdtr, stdtrit
from scipy.stats import spearmanr

from specbench.cli.commands import fail
from specbench.errors import UsageError
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import as_cells, has_runs, read_rows
from specbench.rows.paired import LEVEL
from specbench.storage.csv_text import csv_text
from specbench.tables import catalog, matched, table_runs

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "docs/templates"
PUBLISHED = ROOT / "specbench/tables/published"
_WIDE = 120
LEAST = {"n": 24, "samples": 50_000}
_FIGURE = r"[-−+]?\d+(?:,\d{3})*(?:\.\d+)?"
#: A number, or a commit.
_NUMBER = re.compile(rf"(?<![\w.\-])(?:{_FIGURE}(?:e[-+]?\d+)?|(?=[a-f]*\d)[0-9a-f]{{7,40}})(?!\w)")
_CODE = re.compile(r"```.*?```|^ {4,}\S[^\n]*$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
#: Numbers that are no measurements: targets of links, comments, dates, headings, numbers of items and equations, names.
_ASIDE = re.compile(
    r"\]\([^)]*\)|<!--.*?-->|\b\d{4}-\d\d-\d\d\b|^#+ [^\n]*$|^\d+\. "
    r"|\b(?:Eqs?\.|Table|Fig\.?|Appendix|Algorithm) \d+(?:, \d+)*|\bLumina-mGPT 2\b",
    re.DOTALL | re.MULTILINE,
)
_SLOT = re.compile(r"\{\{ (?:(?P<text>(?:(?!\{\{ | \}\}).)*)\| )?(?P<says>(?:(?!\{\{ ).)*?) \}\}", re.DOTALL)
#: Where a paragraph, an item of a list or a row of a table begins.
_BLOCK = re.compile(r"\n(?=\s*\n|\s*- |\s*\d+\. |\|)")


@dataclass(frozen=True)
class Problem:
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Rows:
    """The functions and rows that slots can use, of the folder `results`."""

    def __init__(self, results: Path, few: Sequence[str] = (), defined: Mapping[str, str] | None = None) -> None:
        self.results, self.few, self.defined = results, few, defined or {}
        self.read, self.plan, self.lines = cache(self._read), cache(self._plan), cache(partial(Lines, self))

    @cached_property
    def names(self) -> dict[str, Any]:
        """The namespace of a template's slots."""
        shared = (get, pm, estimate, ends, apart, z, rank_correlation, verdict)
        functions = {f.__name__: f for f in (abs, all, any, len, max, min, sum, zip, *shared)}
        of_tables = (self.pairs, self.planned_pairs, self.curves)
        queries = {f.__name__: f for f in (self.rows, self.one, self.card, *of_tables)} | {"lines": self.lines}
        constants = {
            "__builtins__": {},
            "settings": (),
            "loads": json.loads,
            "exp": math.exp,
            "erfc": math.erfc,
            "mean": fmean,
        }
        drawn = {name: partial(_drawn, self.plan, draw) for name, draw in doc_tables.DRAWN.items()}
        lines = {table: self.lines(table) for table in catalog.TABLES}
        names = {**lines, **functions, **queries, **constants, **drawn, **doc_tables.WHOLE}
        for name, says in self.defined.items():
            names[name] = _evaluated(says, names)
        return names

    def rows(self, name: str, **where: Any) -> pd.DataFrame:
        table = self.read(name)
        if where:  # at once, since every copy has hundreds of columns
            table = table[np.logical_and.reduce([table[column] == value for column, value in where.items()])]
        if table.empty:
            raise UsageError(f"results/{name}.csv has no row with {where}")
        if not _is_published(name):
            self.enough(name, {size: table[size].min() for size in LEAST if size in table})
        return table

    def one(self, name: str, **where: Any) -> Any:
        table = self.rows(name, **where)
        if len(table) > 1:
            raise UsageError(f"results/{name}.csv has {len(table)} rows with {where}")
        return SimpleNamespace(**table.iloc[0])

    def pairs(self, table: str, **where: Any) -> list[SimpleNamespace]:
        adjusted = chain.from_iterable(matched.adjusted_pairs(self.plan(table)).values())
        matches = [_pair(row, p) for row, p in adjusted]
        matches = [pair for pair in matches if all(getattr(pair, k) == v for k, v in where.items())]
        if not matches:
            raise UsageError(f"results/{table}_pairs.csv has no pair with {where}")
        for pair in matches:
            self.enough(f"{table}, {pair.panel}", {"n": pair.prompts})
        return matches

    def planned_pairs(self, table: str) -> int:
        return matched.planned_pairs(self.plan(table))

    def curves(self, table: str, panel: str, y: str, x: float) -> dict[str, float]:
        values = doc_tables.curves_at(self.plan(table), panel, y, x)
        return {label: at for label, at in values.items() if at is not None}

    def enough(self, source: str, sizes: Mapping[str, Any]) -> None:
        """Raises UsageError if rows are of too few images or samples."""
        for size, least in LEAST.items():
            if (count := sizes.get(size)) and count < least and source not in self.few:
                raise UsageError(f"rests on {size}={count:g} of {source}, below {least}")

    def panels(self, table: str) -> set[str]:
        """The identifiers of the runs of each panel in which a table tests pairs of curves, on every model."""
        tested = catalog.TABLES[table]
        source = table_runs.store(tested, self.results)
        others = pd.read_csv(source, usecols=["model"]).model if source.exists() else ()
        models = {tested.model, *others}
        return set().union(*(self.plan(f"{table}.{model}").equal for model in models))

    def _read(self, name: str) -> pd.DataFrame:
        folder = PUBLISHED.parent if _is_published(name) else self.results
        file, _, model = name.partition(".")
        table = _table(folder / f"{file}.csv")
        if file not in catalog.TABLES or "model" not in table:
            return table
        return table[table.model == (model or catalog.TABLES[file].model)]

    def _plan(self, table: str) -> table_runs.TablePlan:
        name, _, model = table.partition(".")
        requested = catalog.TABLES[name]
        return table_runs.plan(requested, model or requested.model, None, self.results)

    def card(self, stage: str) -> SimpleNamespace:
        text = (self.results / "embedded_models.md").read_text(encoding="utf-8")
        if (row := re.search(rf"^\| {re.escape(stage)} \| (.+) \|$", text, re.M)) is None:
            raise UsageError(f"results/embedded_models.md has no stage {stage}")
        pairs = (pair.split(" ") for pair in row[1].split(", "))
        return SimpleNamespace(**{name: float(value) for name, value in pairs})


class Lines:
    """The rows that the lines of a table show: `field['sjd'].steps`."""

    def __init__(self, rows: Rows, table: str) -> None:
        self.rows, self.table = rows, table

    @cached_property
    def measured(self) -> dict[str, Any]:
        return {key: _namespace(row) for key, row in self.rows.plan(self.table).rows.items() if row is not None}

    def __getitem__(self, key: str) -> Any:
        if key not in self.measured:
            raise UsageError(f"table {self.table} has no row for its line {key} (lines: {', '.join(self.measured)})")
        self.rows.enough(f"{self.table}, line {key}", vars(self.measured[key]))
        return self.measured[key]


def get(line: Any, *columns: Any) -> list[Any]:
    """The named values of a line; `...` stays."""
    return [
        name if name is ... else -getattr(line, name[1:]) if name.startswith("-") else getattr(line, name)
        for name in columns
    ]


def ends(values: Iterable[float]) -> tuple[float, float]:
    """The least and the largest."""
    numbers = list(values)
    return np.nanmin(numbers), np.nanmax(numbers)


def verdict(audited: pd.DataFrame) -> str:
    """The audit's verdict over all these rows together."""
    cells = audited.to_numpy(object, copy=True)
    cells[audited.isna().to_numpy()] = ""
    return doc_tables.verdict([dict(zip(audited.columns, line)) for line in cells.tolist()])


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Spearman's rank correlation of at least four pairs, and its 95 % interval (Bonett and Wright 2000)."""
    rank = float(spearmanr(xs, ys).statistic)
    wide = float(ndtri((1 + LEVEL) / 2)) * math.sqrt((1 + rank**2 / 2) / (len(xs) - 3))
    low, high = (math.tanh(math.atanh(rank) + sign * wide) for sign in (-1, 1))
    return rank, low, high


class Estimate(tuple[float, float]):
    """A value and its standard error. n: the number of images that the error rests on."""

    n: float = math.inf


def estimate(value: float, error: float, n: float) -> Estimate:
    made = Estimate((value, error))
    made.n = n
    return made


def pm(line: Any, y: str) -> Estimate:
    """A value and its standard error, over the line's images."""
    return estimate(getattr(line, y), getattr(line, f"{y}_stderr"), line.n if hasattr(line, "n") else line.images)


def apart(y: str, left: Any, right: Any) -> tuple[float, float]:
    """The 95 % interval of the difference of y, right - left, as if the images were not paired."""
    difference, error, degrees = _welch(pm(left, y), pm(right, y))
    wide = float(stdtrit(degrees, (1 + LEVEL) / 2)) * error
    return difference - wide, difference + wide


def z(left: Sequence[float], right: Sequence[float]) -> float:
    """The normal deviate with the sign of right - left and the p-value of Welch's test of two values with their
    standard errors. A plain pair has an error that is known."""
    difference, error, degrees = _welch(left, right)
    return math.copysign(float(-ndtri(max(stdtr(degrees, -abs(difference) / error), sys.float_info.min))), difference)


def _welch(left: Sequence[float], right: Sequence[float]) -> tuple[float, float, float]:
    """The difference right - left, its standard error, and its degrees of freedom (Welch 1947)."""
    squares = [side[1] ** 2 for side in (left, right)]
    spread = sum(square**2 / (getattr(side, "n", math.inf) - 1) for square, side in zip(squares, (left, right)))
    return right[0] - left[0], math.sqrt(sum(squares)), sum(squares) ** 2 / spread if spread else math.inf


def filled(template: str, rows: Rows, where: str, whole: bool = True) -> tuple[list[Problem], str]:
    """The problems of a template, and its page. whole: a paragraph, an item or a row with numbers and without a slot is
    a problem."""
    problems: list[Problem] = []
    names, parts, end = rows.names, list[str](), 0
    for slot in _SLOT.finditer(template):
        at = f"{where}:{template.count(chr(10), 0, slot.start()) + 1}"
        parts.append(template[end : slot.start()])
        end = slot.end()
        text, says = slot["text"], " ".join(slot["says"].split())
        try:
            values = list(_flat(_evaluated(says, names)))
            if any(value is False for value in values):
                problems.append(Problem(at, f"does not hold: {says}"))
            values = [value for value in values if not isinstance(value, bool)]
            parts.append(
                "".join(map(str, values)).rstrip() if text is None else _with_values(text.rstrip(), values, says)
            )
        except UsageError as error:
            problems.append(Problem(at, str(error)))
    if whole:
        problems += _without_slot(template, where)
    return problems, wrapped("".join([*parts, template[end:]]))


def _with_values(text: str, values: Sequence[Any], says: str) -> str:
    """A slot's text with its numbers. UsageError for another number of values."""
    numbers = list(_NUMBER.finditer(_blank(_ASIDE, _blank(_CODE, text))))
    if len(numbers) != len(values):
        raise UsageError(f"{len(values)} values for the {len(numbers)} numbers of '{text}': {says}")
    for number, value in reversed([*zip(numbers, values)]):
        shown = number[0] if value is ... else as_printed(value, number[0])
        text = text[: number.start()] + shown + text[number.end() :]
    return text


def _without_slot(template: str, where: str) -> Iterator[Problem]:
    """The paragraphs, items and rows that have a number and no slot."""
    plain = _blank(_ASIDE, _blank(_CODE, template))
    starts = [0, *(block.end() for block in _BLOCK.finditer(plain))]
    for start, stop in zip(starts, [*starts[1:], len(plain)]):
        if "{{ " not in template[start:stop] and (number := _NUMBER.search(plain, start, stop)):
            line = template.count("\n", 0, number.start()) + 1
            yield Problem(f"{where}:{line}", f"{number[0]} has no row: put it into a slot")


def wrapped(page: str) -> str:
    """A page whose paragraphs and list items are wrapped again, since slots are longer or shorter than their values."""
    blocks = []
    for block in re.split(r"(\n\n+|(?<=\n)(?= *(?:- |\d+\. ))|^```.*?^```$)", page, flags=re.DOTALL | re.MULTILINE):
        first = re.match(r"( *)(- |\d+\. )?(?![-|#!<>\s`{])\S", block) or re.match(r"( *)(- |\d+\. )?`[^`]", block)
        lines = block.splitlines()
        is_text = first and not (first[2] is None and len(first[1]) >= 4) and not any("|" in line[:1] for line in lines)
        if not is_text or "<br>" in block or (len(lines) < 2 and len(block) <= _WIDE):
            blocks.append(block)
            continue
        indent = " " * len(first[1] + (first[2] or ""))
        text = textwrap.fill(
            " ".join(block.split()), _WIDE, initial_indent=first[1], subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        blocks.append(text + ("\n" if block.endswith("\n") else ""))
    return "".join(blocks)


def _table(path: Path) -> pd.DataFrame:
    """A CSV file, with the details of rows of runs as columns."""
    if not has_runs(path):
        return pd.read_csv(path, low_memory=False)
    return pd.read_csv(io.StringIO(csv_text(COLUMNS, map(as_cells, read_rows(path)))), low_memory=False)


def check_commit(rows: Rows, commit: str, exceptions: Mapping[str, str | Mapping[str, str]]) -> list[Problem]:
    """The files under results/ that are not of `commit`, or that were made from rows that do not exist. Rows are
    checked by their own commit, tests by the runs that they compare, drawn tables by the commits that they print.
    exceptions: files -> the reason, or the `commit` (or several) of some of their rows."""
    results = rows.results
    files = {path.relative_to(results) for kind in ("*.csv", "tables/*.md") for path in results.rglob(kind)}
    excepted = {pattern: {path for path in files if path.match(pattern)} for pattern in exceptions}
    unused = [pattern for pattern, paths in excepted.items() if not paths]
    problems = [Problem("results/numbers.yaml", f"excepts {pattern}, and no such file exists") for pattern in unused]
    allowed = {name: entry["commit"] for name, entry in exceptions.items() if isinstance(entry, Mapping)}
    later = {name: str(commits).split() for name, commits in allowed.items()}
    checked = sorted(files - set().union(*(paths for name, paths in excepted.items() if name not in later)))
    as_text = {"dtype": str, "keep_default_na": False}
    tables = {path: pd.read_csv(results / path, **as_text) for path in checked if path.suffix == ".csv"}
    runs = {run for table in tables.values() if "run_id" in table for run in table["run_id"]}
    for path in checked:
        also = [other for name, others in later.items() if path in excepted[name] for other in others]
        if path.suffix == ".md":
            commits = re.findall(r"\b[0-9a-f]{40}(?:-dirty)?", (results / path).read_text(encoding="utf-8"))
            foreign = _foreign(commits, commit, also)
        elif "commit" in tables[path]:
            foreign = _foreign(tables[path]["commit"], commit, also)
        elif {"run_a", "run_b"} <= set(tables[path]):
            foreign = {*tables[path]["run_a"], *tables[path]["run_b"]} - runs
        elif "runs" in tables[path]:
            foreign = set(tables[path]["runs"]) - rows.panels(path.stem.removesuffix("_pairs"))
        else:
            foreign = {"a file that names none"}
        if foreign:
            others = ", ".join(sorted(name or "none" for name in foreign)[:3])
            problems.append(Problem(f"results/{path}", f"is not of commit {commit} alone: {others}"))
    return problems


def _foreign(commits: Iterable[str], commit: str, also: Sequence[str]) -> set[str]:
    """The commits that are not allowed: neither `commit` nor one in `also`; and a message for each unused one in
    `also`."""
    commits = set(commits)
    unused = {f"{name} has no row in it" for name in also if not any(map(partial(_is, commit=name), commits))}
    return {name for name in commits if not any(_is(name, allowed) for allowed in (commit, *also))} | unused


def _is(stated: str, commit: str) -> bool:
    return stated.startswith(commit) and "-" not in stated


def as_printed(value: Any, printed: str) -> str:
    """`value` in the format of `printed`: as many digits, its sign and separators; a commit with as many characters."""
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


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """`text` with blanks in place of all matches of the pattern, so that positions do not change."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _evaluated(says: str, names: dict[str, Any]) -> Any:
    try:
        return eval(f"({says})", names)  # noqa: S307 (the repository's own pages)
    except (KeyError, IndexError, AttributeError, SyntaxError, TypeError, NameError, ValueError, OSError) as error:
        raise UsageError(f"{says}: {type(error).__name__}: {error}") from error


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_flat, value))
    else:
        yield bool(value) if isinstance(value, np.bool_) else value


def _drawn(plan: Any, draw: Any, table: str, *arguments: Any, **named: Any) -> str:
    return doc_tables.markdown(draw(plan(table), *arguments, **named))


def _is_published(name: str) -> bool:
    return name.startswith(PUBLISHED.name)


def _pair(row: Mapping[str, str], adjusted: float) -> SimpleNamespace:
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for low, high, above in matched.stretches(row):
        spans[above].append((low, high))
    about = vars(_namespace(row)) | {"p": matched.p_of(row), "adjusted": adjusted}
    return SimpleNamespace(**about, above=spans[True], below=spans[False])


def _namespace(row: Mapping[str, str]) -> SimpleNamespace:
    return SimpleNamespace(**{name: _number(text) for name, text in row.items()})


@cache
def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def templates() -> dict[Path, Path]:
    """Template -> page."""
    return {path: ROOT / path.relative_to(TEMPLATES) for path in sorted(TEMPLATES.rglob("*.md"))}


def main(argv: Sequence[str] | None = None) -> int:
    write = "--write" in (sys.argv[1:] if argv is None else argv)
    about = yaml.safe_load((ROOT / "results/numbers.yaml").read_text(encoding="utf-8"))
    rows = Rows(ROOT / "results", about.get("few", []), about.get("names"))
    commit, whole = about.get("commit"), about.get("whole", [])
    problems = check_commit(rows, str(commit), about.get("except", {})) if commit else []
    for template, path in templates().items():
        name = path.relative_to(ROOT).as_posix()
        page_problems, page = filled(
            template.read_text(encoding="utf-8"), rows, f"docs/templates/{name}", name in whole
        )
        problems += page_problems
        if write and not page_problems:
            path.write_text(page, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != page:
            problems.append(Problem(name, "is not what its template gives: run make pages"))
    print("\n".join(map(str, problems)) or "every page is what its template and the rows give")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(fail(error, 2))
