"""Choosing among rows: conditions, an order, columns, and how a value is printed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specbench.errors import UsageError, plain, unknown
from specbench.rows.columns import COLUMNS, SHOWN, stderr_of
from specbench.rows.pool import spread_of

Row = Mapping[str, Any]

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}
_CONDITION = re.compile(r"(\w+)(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_DIGITS = 4  # significant digits of a number that no column says how to print


def column(name: str) -> str:
    """A name of a column. UsageError for an unknown one."""
    if name not in COLUMNS and name != "seeds":
        raise unknown("column", plain(name), COLUMNS)
    return name


def condition(text: str) -> Callable[[Row], bool]:
    """A test of a row: column=a,b (any of these), column!=a, column<=4. An empty cell equals the empty text, and is
    neither less nor more than anything. UsageError for what cannot be read."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(
            f"cannot read the condition '{plain(text)[:100]}': write column=value, column!=value, column>=4"
        )
    name, operator, value = match.groups()
    column(name)
    if operator in _OPERATORS:
        try:
            bound = float(value)
        except ValueError:
            raise UsageError(f"the condition '{plain(text)[:100]}' compares with a number") from None
        return lambda row: isinstance(row.get(name), int | float) and _OPERATORS[operator](row[name], bound)
    wanted = value.split(",")
    return lambda row: any(_equals(row.get(name), one) for one in wanted) == (operator == "=")


def _equals(cell: Any, text: str) -> bool:
    if cell is None or not isinstance(cell, int | float):
        return ("" if cell is None else str(cell)) == text
    try:
        return math.isclose(cell, float(text), rel_tol=1e-12)
    except ValueError:
        return False


def ordered(rows: Iterable[Row], names: Sequence[str]) -> list[Row]:
    """Rows by columns, each ascending, or descending with a minus before its name; rows without a value last."""
    found = list(rows)
    for name in reversed(names):
        down, key = name.startswith("-"), column(name.removeprefix("-"))
        there = [row for row in found if row.get(key) is not None]
        numbers = all(isinstance(row[key], int | float) for row in there)
        there.sort(key=lambda row: row[key] if numbers else str(row[key]), reverse=down)
        found = [*there, *(row for row in found if row.get(key) is None)]
    return found


def shown(row: Row, name: str) -> str:
    """A cell for print: a number with its spread between seeds or its standard error; empty where there is none."""
    cell = row.get(name)
    if cell is None:
        return ""
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
