"""Tokens that a step makes, as far as they are known before a run: what papers print for the method on the model, else
what the embedded model's rows have, else the bounds of the draft."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specbench.tables import literature
from specbench.tables.definitions import DEFAULT_MODEL
from specbench.tables.measure import rows_in

#: Columns of published files that tell lines of one method apart -> the parameter.
_TOLD_BY = {name: name for name in ("delta", "nu", "k", "window", "gamma", "temperature", "top_k")} | {"lambda": "lam"}


@dataclass(frozen=True)
class TokensPerStep:
    """The least and the most that is known; where from, and the names of what that holds for: tables, or methods."""

    low: float
    high: float
    source: str = ""
    names: tuple[str, ...] = ()


def known(cfg: Mapping[str, Any], tokens: int, most: int, results: Path) -> TokensPerStep:
    """Of a method on a model whose images have so many `tokens`; most: tokens that one step can make; results: the
    folder with the embedded model's rows."""
    if cfg["method"] == "vanilla":
        return TokensPerStep(1, 1)
    lines = [(table, row) for table, row in _published() if (row.of, row.method_key) == (cfg["model"], cfg["method"])]
    printed = [(table, row, value) for table, row in lines if (value := _of_line(row.cells, tokens))]
    same = [one for one in printed if _is_like(one[1].cells, cfg)]
    if values := {value: table for table, _, value in same or printed}:
        return TokensPerStep(min(values), max(values), f"printed for {cfg['model']} in", tuple(values.values()))
    own = _embedded(cfg["method"], results)
    if own:
        return TokensPerStep(max(1.0, min(own)), max(own), "only the embedded model's rows have", (cfg["method"],))
    return TokensPerStep(1, most, "from one token to the whole draft, since nothing is known of", (cfg["method"],))


@cache
def _published() -> tuple[tuple[str, literature.PublishedRow], ...]:
    return tuple((table, row) for table in literature.available() for row in literature.load(table))


def _is_like(cells: Mapping[str, str], cfg: Mapping[str, Any]) -> bool:
    """Whether a printed line has the parameters of a configuration, as far as it states them."""
    for column, name in _TOLD_BY.items():
        stated = cells.get(column)
        if stated and cfg.get(name) is not None:
            with suppress(TypeError, ValueError):
                if float(stated) != float(cfg[name]):
                    return False
    return True


def _of_line(cells: Mapping[str, str], tokens: int) -> float | None:
    """Tokens a step: an accepted length, a step compression, or an image's tokens over its steps."""
    for column in ("accepted_length_mean", "speedup_step", "steps"):
        if cells[column]:
            value = float(cells[column])
            return tokens / value if column == "steps" else value
    return None


def _embedded(method: str, results: Path) -> list[float]:
    rows = rows_in(results) if results.is_dir() else []
    mine = [row for row in rows if (row.get("model"), row.get("method")) == (DEFAULT_MODEL, method)]
    return [float(row["accepted_length_mean"]) for row in mine if row.get("accepted_length_mean")]
