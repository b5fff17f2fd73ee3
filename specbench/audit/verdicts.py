"""When an audit calls a method lossless, and what it doubts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from specbench.audit.exercised import Exercised

#: A p-value below it is "not lossless". `--all` tests some 200 true hypotheses, so 1e-5 rejects one of them by chance
#: in 0.2 % of all seeds. Bonferroni is conservative here, since prefixes contain each other, and sums of tokens contain
#: the tokens. The test still finds a relevant bias: a total variation of 0.02 in a first token of equally likely values
#: gives p near 1e-68 at 200,000 samples, and a Kolmogorov-Smirnov distance of 0.01 gives p near 1e-7.
LEVEL = 1e-5

#: A p-value below it, but not below LEVEL, decides nothing: FURTHER times as many sequences do, all of them new. A
#: lossless method is refuted with a probability of at most LEVEL by the first ones, and, independently, of at most
#: DOUBT * LEVEL by the new ones: of 1.001 LEVEL in all. The same holds at every other level.
DOUBT, FURTHER = 1e-3, 10

#: audit.margin, if it is not given: what the default samples resolve of every model (a limit of 0.04 at the worst).
MARGIN = 0.05

_Row = Mapping[str, Any]


def in_stages(measure: Callable[[range], dict[str, Any]], samples: int) -> dict[str, Any]:
    """The row of sequences 0 .. samples - 1, or, where its p-value decides nothing, of FURTHER times as many after
    these; measure: the row of some sequences, without a verdict."""
    row, first = measure(range(samples)), None
    if LEVEL <= row["p_value"] < DOUBT:
        first, row = row["p_value"], measure(range(samples, (1 + FURTHER) * samples))
    return row | {"p_first": first, "verdict": verdict([row])}


def verdict(rows: Iterable[_Row]) -> str:
    """Of all rows together: a part of the method need be at work in one of them only."""
    rows = list(rows)
    if any(row["p_value"] < LEVEL for row in rows):
        return "not lossless"
    return "undecided" if missing(rows) or any(any(doubts(row)) for row in rows) else "lossless"


def limit(row: _Row) -> float:
    """The upper confidence limit of the row's distance."""
    high: float = row["ks_high"] if row["tv_high"] is None else row["tv_high"]
    return high


def doubts(row: _Row) -> Iterator[str]:
    """Why the sequences of a row that is not refuted leave open whether the method is lossless."""
    if row["p_value"] < DOUBT:
        yield f"p = {row['p_value']:.2g} is below {DOUBT:g} again; draw more sequences (audit.samples=)"
    if limit(row) > row["margin"]:
        yield (
            f"the limit {limit(row):.4f} exceeds audit.margin={row['margin']:g}; it falls with the square root of"
            " audit.samples"
        )


def missing(rows: Iterable[_Row]) -> list[str]:
    """The parts of the method that were at work in none of the rows."""
    lacking: dict[str, None] = {}
    total = exercised(rows := list(rows))
    for row in rows:
        lacking |= dict.fromkeys(Exercised.read(row["exercised"] or "").missing(row["T"]))
    return [part for part in lacking if not total[part]]


def exercised(rows: Iterable[_Row]) -> Exercised:
    """How often each part was at work in all rows."""
    total = Exercised()
    for row in rows:
        for part, count in Exercised.read(row["exercised"] or "").items():
            total[part] += count
    return total
