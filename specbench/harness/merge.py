"""Merges two rows of the same images: scores that still hold stay, and every changed or dropped value is named.

A score belongs to the images over which it was computed. While these are the same, it stays in its column until another
metric takes that column. When they differ, it is computed again or dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specbench.config import parameters
from specbench.metrics import Score
from specbench.rows.columns import COLUMNS, METRICS, OF_RECORDS

#: The columns that a metric can fill.
SCORES = tuple(name for name in METRICS if name not in OF_RECORDS)

_UNNAMED = ("note", "protocol", "commit")  # columns that are not measurements and may become empty


def scores(row: Mapping[str, Any]) -> dict[str, Score]:
    """Column -> score of the metrics that a row has, read back from its cells and its note."""
    notes: dict[str, list[str]] = {}
    column = ""
    for part in (row["note"] or "").split("; "):
        name, colon, text = part.partition(": ")
        if colon and name in SCORES:
            column = name
            notes[column] = [text]
        elif column:
            notes[column].append(part)
    return {
        name: Score(row[name], row[f"{name}_stderr"], row[f"{name}_backend"] or "", "; ".join(notes.get(name, ())))
        for name in SCORES
        if row[name] is not None or row[f"{name}_backend"] is not None or name in notes
    }


def rivals(name: str, others: Iterable[str]) -> list[str]:
    """The metrics among `others` that fill a column of the metric `name`, too."""
    mine = set(parameters.metric_columns(name))
    return [other for other in others if other != name and mine & set(parameters.metric_columns(other))]


def names(had: Sequence[str], requested: Sequence[str]) -> list[str]:
    """The metrics of a row after a request for others: the requested ones win the columns that both fill. The earlier
    ones keep their order, so that the same request has the same configuration."""
    retained = [name for name in had if name in requested or not rivals(name, requested)]
    return [*retained, *(name for name in requested if name not in retained)]


def both(old: Mapping[str, Score], new: Mapping[str, Score]) -> dict[str, Score]:
    """The scores of a row over the same images: a new one replaces an old one, unless it has no value."""
    retained = {name: one for name, one in old.items() if one.value is not None and _empty(new.get(name))}
    found = {**old, **new, **retained}
    return {name: found[name] for name in SCORES if name in found}


def unmeasured(old: Mapping[str, Score], new: Mapping[str, Score]) -> list[str]:
    """A sentence for each score that could not be computed again, so that the earlier one stays."""
    return [
        f"{name} could not be measured ({one.note or 'no value'}): the row keeps {_shown(old[name])} from before"
        for name, one in new.items()
        if one.value is None and not _empty(old.get(name))
    ]


def changes(before: Mapping[str, Any], after: Mapping[str, Any], reasons: Mapping[str, str]) -> list[str]:
    """A sentence for each value of the row `before` that the row `after` lacks, or that another metric replaced.
    reasons: column -> why it has no value."""
    messages = []
    grown = before["n"] != after["n"]
    if grown:
        messages.append(f"the row was over {before['n']} images and is now over {after['n']}")
    for name in COLUMNS:
        if before[name] is None or name in _UNNAMED or name.endswith(("_stderr", "_backend")):
            continue
        if after[name] is None:
            why = reasons.get(name) or (f"it was over {before['n']} images" if grown else "it does not hold any more")
            messages.append(f"{name} is no longer in the row: {why} (it was {_cell(before, name)})")
        elif name in SCORES:
            other = before[f"{name}_backend"] != after[f"{name}_backend"]
            if other or (not grown and before[name] != after[name]):
                messages.append(f"{name} {_cell(after, name)} replaces {_cell(before, name)}")
    return messages


def _empty(score: Score | None) -> bool:
    return score is None or score.value is None


def _shown(score: Score) -> str:
    return f"{score.value:.6g}" + (f" [{score.backend}]" if score.backend else "")


def _cell(row: Mapping[str, Any], name: str) -> str:
    backend = row.get(f"{name}_backend")
    value = row[name]
    text = f"{value:.6g}" if isinstance(value, float) else f"{value:.80}" if isinstance(value, str) else str(value)
    return text + (f" [{backend}]" if backend else "")
