"""Selects rows and columns: conditions, an order, groups, and how they are printed.

Rows that differ only in their seed are shown as one: means, and the standard deviation between seeds.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.config import parameters, registry
from specbench.errors import UsageError, decimal, plain, unknown
from specbench.rows import remark_text
from specbench.rows.columns import COLUMNS, INTEGERS, METRICS, NUMBERS, SHOWN, Columns, Row, stderr_of
from specbench.rows.csv_files import aligned
from specbench.rows.remark import Remark, as_json, remark, remarks_of
from specbench.rows.shown import MACHINE

#: Columns that must be equal in rows that are pooled: every parameter except the seed, the backends, and the machine.
_SAME = (
    *(name for name in parameters.table() if name in COLUMNS and name not in ("seed", "protocol", "variant")),
    *(f"{name}_backend" for name in METRICS),
    *MACHINE,
    "commit",
    "specbench",
    "timing",
)
#: Columns that differ between such rows; a pooled row lists all their values.
_UNPOOLED = ("run_id", "time", "config_hash", "seed", "prompts_hash", "remarks")


def spread_of(column: str) -> str:
    """The column of pooled rows with the standard deviation between seeds. A row of one seed does not have it."""
    return f"{column}_seed_std"


def key(row: Row) -> tuple[str, ...]:
    """The values that rows share if they differ only in their seed."""
    return tuple(_plain(row.get(name)) for name in _SAME)


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups rows that differ only in their seed, in the order of their first rows. Of several rows with one seed, the
    newest counts."""
    by_key: dict[tuple[Any, ...], dict[Any, Row]] = {}
    for row in rows:
        seeds = by_key.setdefault(key(row), {})
        seed = _plain(row.get("seed"))
        if seed not in seeds or str(row.get("time") or "") >= str(seeds[seed].get("time") or ""):
            seeds[seed] = row
    return [list(seeds.values()) for seeds in by_key.values()]


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def pooled(rows: Sequence[Row]) -> Columns:
    """One row for several: for a number the mean over the rows, with the standard deviation between them in the column
    `spread_of`; for a list of numbers their means; for a text every value; the remarks, after one on the number of
    rows, which is also in `seeds`. A remark that not all rows have names the seeds of those that have it. A number or a
    list that is missing in some rows is missing.

    Standard errors of single rows are dropped: they are within a seed, whereas the spread is between seeds.
    """
    if len(rows) == 1:
        return dict(rows[0])
    result: Columns = {}
    spreads: Columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name) for row in rows]
        is_condition = name in parameters.table() or name in MACHINE
        if name == "remarks":
            result[name] = as_json([remark("runs", runs=len(rows)), *_pooled_remarks(rows)])
        elif (is_condition or name in INTEGERS) and _agree(cells):
            result[name] = cells[0]
        elif is_condition or name not in NUMBERS or name in _UNPOOLED:
            result[name] = _mean_list_or_texts(cells, name)
        elif name.endswith(("_stderr", "_std")):
            result[name] = None
        else:
            numbers = [number for cell in cells if (number := _number(cell)) is not None]
            if len(numbers) < len(rows):
                result[name] = None
            else:
                result[name] = statistics.fmean(numbers)
                spreads[spread_of(name)] = statistics.stdev(numbers)
    if not _agree([row.get("timing_valid") for row in rows]):
        result["timing_valid"] = "false"
    return result | spreads | {"seeds": len(rows)}


def _agree(cells: Sequence[Any]) -> bool:
    return len({_plain(cell) for cell in cells}) <= 1


def _pooled_remarks(rows: Sequence[Row]) -> list[Remark]:
    """The remarks of all rows, each once; those that not all rows have, with the seeds of the rows that have them."""
    own = [remarks_of(row) for row in rows]
    result: list[Remark] = []
    for one in itertools.chain(*own):
        having = [row for row, remarks in zip(rows, own, strict=True) if one in remarks]
        if len(having) < len(rows):
            seeds = ", ".join(_plain(row.get("seed")) for row in having)
            one = remark("of_seeds", one.column, of=one.code, values=dict(one.values), seeds=seeds)
        if one not in result:
            result.append(one)
    return result


def _mean_list_or_texts(cells: Sequence[Any], name: str) -> str | None:
    """The means of lists of numbers; for other cells every text once, None if all are empty."""
    lists = [_list(cell) for cell in cells]
    if any(lists):
        return _mean_list(lists, name)
    texts = dict.fromkeys(_plain(cell) for cell in cells if cell not in (None, ""))
    return " / ".join(texts) or None


def _list(cell: Any) -> list[float | None]:
    """A JSON list of numbers and nulls; [] for anything else."""
    try:
        numbers = json.loads(cell) if _plain(cell).startswith("[") else []
        return [None if number is None else float(number) for number in numbers]
    except (ArithmeticError, RecursionError, TypeError, ValueError):
        return []


def _mean_list(lists: Sequence[list[float | None]], name: str) -> str | None:
    """The mean of each entry over the lists, without nulls. An entry after the end of a list is unknown, and 0 in a
    histogram."""
    if not all(lists):
        return None
    end = 0.0 if name == "accepted_histogram" else None
    known = [[v for v in entries if v is not None] for entries in itertools.zip_longest(*lists, fillvalue=end)]
    return json.dumps([statistics.fmean(entries) if entries else None for entries in known])


def _number(cell: Any) -> float | None:
    try:
        return None if cell in (None, "") else decimal(str(cell))
    except ValueError:
        return None


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"(\w+)(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
#: Columns that are shown by default if some row has them, after the columns in which the rows differ.
RESULTS = (
    "accepted_length_mean",
    "speedup_step",
    "speedup_latency",
    "latency_s_mean",
    "emitted_kl",
    "perplexity",
    *METRICS,
)
#: Parameters that every configuration has and that do not distinguish methods.
_QUIET = ("seed", "warmup", "protocol", "timing", "drafter", "rule", "verification")
_WHERE = ("device_name", "dtype", "engine", "torch", "commit")
#: Columns in which the rows of a group should agree.
_MIXED = ("model", "data", "n", *(f"{name}_backend" for name in METRICS), *_WHERE)
_DIGITS = 4  # significant digits of a number in a column without a format


def column(name: str) -> str:
    """Checks the name of a column, or of the spread of one between seeds. UsageError for an unknown one."""
    if name not in COLUMNS and name not in map(spread_of, NUMBERS) and name != "seeds":
        raise unknown("column", plain(name), COLUMNS)
    return name


def is_pooled(name: str) -> bool:
    """Whether rows of several seeds share one value of this column, which the single rows do not have."""
    return name not in COLUMNS or (name in NUMBERS and name not in (*_UNPOOLED, *MACHINE, *parameters.table()))


@dataclass(frozen=True)
class Condition:
    """A condition on the column `name`."""

    name: str
    test: Callable[[Row], bool]

    def __call__(self, row: Row) -> bool:
        return self.test(row)


def condition(text: str) -> Condition:
    """A test of a row: column=a,b (any of these), column!=a, column<=4. An empty cell equals the empty text, and is
    neither less nor greater than any number. UsageError for text that is not a condition."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(
            f"cannot read the condition '{plain(text)[:100]}': write column=value, column!=value or column>=4"
        )
    name, sign, value = match.groups()
    column(name)
    if sign in _OPERATORS:
        try:
            bound = decimal(value)
        except ValueError:
            raise UsageError(f"the condition '{plain(text)[:100]}' needs a number after {sign}") from None
        return Condition(
            name, lambda row: isinstance(row.get(name), int | float) and _OPERATORS[sign](row[name], bound)
        )
    wanted = value.split(",")
    return Condition(name, lambda row: any(_equals(row.get(name), text) for text in wanted) == (sign == "="))


def _equals(cell: Any, text: str) -> bool:
    if cell is None or not isinstance(cell, int | float):
        return ("" if cell is None else str(cell)) == text
    try:
        return math.isclose(cell, decimal(text), rel_tol=1e-12)
    except ValueError:
        return False


def ordered(rows: Iterable[Row], names: Sequence[str]) -> list[Row]:
    """Sorts rows by columns, each ascending, or descending with a minus before its name; rows without a value last."""
    result = list(rows)
    for name in reversed(names):
        down, key = name.startswith("-"), column(name.removeprefix("-"))
        filled = [row for row in result if row.get(key) is not None]
        numbers = all(isinstance(row[key], int | float) for row in filled)
        filled.sort(key=lambda row: row[key] if numbers else str(row[key]), reverse=down)
        result = [*filled, *(row for row in result if row.get(key) is None)]
    return result


def cell_text(row: Row, name: str) -> str:
    """A cell for print: a number with its spread between seeds or its standard error; "" for an empty cell."""
    cell = row.get(name)
    if cell is None:
        return ""
    if name == "remarks":
        return plain(remark_text.joined(remarks_of(row)))
    if not isinstance(cell, int | float) or isinstance(cell, bool):
        return plain(cell)
    spread = row.get(spread_of(name)) if row.get("seeds", 1) > 1 else row.get(stderr_of(name))
    if not isinstance(cell, float) and name not in SHOWN:
        return str(cell)
    decimals = SHOWN[name].decimals if name in SHOWN else None
    if spread is None or not isinstance(spread, int | float):
        return f"{cell:.{_DIGITS}g}" if decimals is None else f"{cell:.{decimals}f}"
    if decimals is None:
        decimals = max(0, min(9, 1 - math.floor(math.log10(spread)))) if spread > 0 else 2
    return f"{cell:.{decimals}f} ± {spread:.{decimals}f}"


def grouped(rows: Sequence[Row], names: Sequence[str], pool_seeds: bool) -> tuple[list[Columns], list[str]]:
    """One row for all rows that agree in these columns or, without columns, for the seeds of a configuration; each with
    the number of its rows as `seeds`. And notes on each group whose rows differ in prompts, scorer, device, code or
    arithmetic, or of which only some have a result."""
    if not names:
        by_seed = groups(rows) if pool_seeds else [[row] for row in rows]
        return [{"seeds": 1} | pooled(group) for group in by_seed], []
    by_key: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_key.setdefault(tuple(_plain(row.get(column(name))) for name in names), []).append(row)
    notes = []
    for key, group in by_key.items():
        if odd := [name for name in _MIXED if len({row.get(name) for row in group}) > 1]:
            notes.append(f"the group {' '.join(key)} mixes rows that differ in {', '.join(odd)}")
        counts = {name: sum(row.get(name) is not None for row in group) for name in RESULTS}
        if some := [f"{name} ({n})" for name, n in counts.items() if 0 < n < len(group)]:
            notes.append(
                f"the group {' '.join(key)} has no mean of what only some of its {len(group)} rows have:"
                f" {', '.join(some)}"
            )
    return [{"seeds": 1} | pooled(group) for group in by_key.values()], notes


def telling(rows: Sequence[Row], groups: Sequence[str]) -> list[str]:
    """The columns that distinguish the rows, and the results that some row has."""
    named = list(groups) or ["model", "method", *differing(rows)]
    results = [name for name in RESULTS if any(row.get(name) is not None for row in rows)]
    return list(dict.fromkeys([*named, *([] if groups else ["n"]), "seeds", *results]))


def differing(rows: Sequence[Row]) -> list[str]:
    """The parameters in which rows differ, besides model, method and n, and the columns of the machine in which they
    differ. A parameter that only some methods have, with one value, says no more than the method."""

    def differs(name: str) -> bool:
        cells = {(row.get("method"), _without_drafter(row, name)) for row in rows}
        return len({cell for _, cell in cells} - {""}) > 1 or len(cells) > len({method for method, _ in cells})

    names = [name for name in parameters.table() if name in COLUMNS and name not in (*_QUIET, "model", "method", "n")]
    return [name for name in (*names, *_WHERE) if differs(name)]


def _without_drafter(row: Row, name: str) -> str:
    """A cell as text; for weights, only the model's."""
    text = _plain(row.get(name))
    return registry.target_weights(text) if name == "weights" else text


def as_table(rows: Iterable[Row], columns: Sequence[str], markdown: bool = False) -> str:
    """Rows as aligned text, with cells cut at 40 characters, or as a Markdown table."""
    lines = [[cell_text(row, name) for name in columns] for row in rows]
    if markdown:
        lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        return "\n".join("| " + " | ".join(line) + " |" for line in (columns, ["---"] * len(columns), *lines))
    cut = [[cell if len(cell) <= 40 else f"{cell[:37]}..." for cell in line] for line in lines]
    return "\n".join(aligned([columns, *cut], len(columns)))
