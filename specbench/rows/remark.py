"""A remark as a value: what is said about which column of a row, and its numbers. `remark_text` says it as a sentence.

In records of scores, rows and their details, remarks are a JSON list:

    [{"code": "batches", "values": {"batch": 16}}, {"code": "biased", "values": {...}, "column": "fid"}]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specbench.rows.columns import Row


@dataclass(frozen=True)
class Remark:
    """code: what is said, see `remark_text.SENTENCES`; values: its numbers and names, as in JSON; column: the column
    that it is about, "" for the whole row."""

    code: str
    values: Mapping[str, Any] = field(default_factory=dict)
    column: str = ""

    def about(self, column: str) -> Remark:
        """The same remark about a column."""
        return replace(self, column=column)


def remark(code: str, column: str = "", **values: Any) -> Remark:
    """A remark with these values."""
    return Remark(code, values, column)


def free(text: str) -> Remark:
    """A remark in the words of an error or of a plug-in."""
    return remark("text", text=text)


def as_json(remarks: Iterable[Remark]) -> list[dict[str, Any]]:
    """Remarks as values of JSON."""
    return [{"code": r.code, "values": dict(r.values), **({"column": r.column} if r.column else {})} for r in remarks]


def of_json(values: Iterable[Mapping[str, Any]]) -> tuple[Remark, ...]:
    """The remarks of such a list. TypeError or KeyError if it has another form."""
    return tuple(Remark(str(v["code"]), dict(v["values"]), str(v.get("column", ""))) for v in values)


def remarks_of(row: Row) -> tuple[Remark, ...]:
    """The remarks of a row, whose cell may be a list, its JSON text or empty. A damaged cell has none."""
    cell = row.get("remarks") or []
    try:
        return of_json(json.loads(cell) if isinstance(cell, str) else cell)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return ()
