"""A metric of a run's images compared with vanilla AR's images of the same prompts: values and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from specbench.rows.columns import FLOAT32, SHOWN, Row
from specbench.rows.paired import LEVEL, POWER, half_interval, p_value, pairs_for, reach
from specbench.rows.shown import bias_of_difference

SHARE = 0.01  # of vanilla's value: the difference for which the required prompts are counted


@dataclass(frozen=True)
class Difference:
    """A metric's column, its value, and vanilla's value over the same n prompts. stderr: of value - vanilla, over
    prompts; None if unknown. bias: why the difference is no evidence, "" if it is."""

    column: str
    value: float
    vanilla: float
    n: int
    stderr: float | None
    bias: str = ""

    @property
    def difference(self) -> float:
        return self.value - self.vanilla

    @property
    def is_tested(self) -> bool:
        """Whether the differences vary between prompts, so that an interval exists."""
        return self.stderr is not None and self.stderr > FLOAT32 * max(abs(self.value), abs(self.vanilla))

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the `LEVEL` interval, by Student's t; only valid if `is_tested`."""
        half = half_interval(self.n, self.stderr or 0.0)
        return self.difference - half, self.difference + half

    @property
    def p(self) -> float:
        """Two-sided p-value of the paired t-test; only valid if `is_tested`."""
        return p_value(self.n, self.difference, self.stderr or math.inf)

    @property
    def is_significant(self) -> bool:
        return self.is_tested and not self.bias and self.p < 1 - LEVEL

    def sentences(self) -> list[str]:
        """Both values and the interval; the conclusion from the interval; how many prompts a difference needs."""
        digits = 4 if not self.is_tested else min(9, max(4, 1 - math.floor(math.log10(self.stderr or 1))))
        first = f"vanilla {self.vanilla:.{digits}f}, difference {self.difference:+.{digits}f}"
        if self.stderr is None:
            return [f"{first} (its error is not known, so that its significance is not known either)"]
        if not self.is_tested:
            return [f"{first}, for every prompt: nothing to test"]
        low, high = self.interval
        first += f" ({100 * LEVEL:g} % interval {low:+.{digits}f} to {high:+.{digits}f})"
        p = f"p = {self.p:.2g}" if self.p >= 1e-300 else "p < 1e-300"
        if self.bias:
            return [first, f"{p}; {self.bias}"]
        return [first, self._verdict(low, high, digits, p), self._needed(digits)]

    def _verdict(self, low: float, high: float, digits: int, p: str) -> str:
        """The conclusion in words: which losses and gains the interval contains or excludes."""
        signs = {"loss": -1, "gain": 1} if SHOWN[self.column].better == "higher" else {"loss": 1, "gain": -1}
        if self.is_significant:
            what = next(name for name, sign in signs.items() if sign * self.difference > 0)
            least, most = (self._size(end, digits) for end in sorted((abs(low), abs(high))))
            return f"significant ({p}): a {what} between {least} and {most}"
        loss, gain = (self._size(low if sign < 0 else high, digits) for sign in signs.values())
        return (
            f"not significant ({p}), which does not mean equal: the interval excludes only a loss above {loss} and a"
            f" gain above {gain}"
        )

    def _needed(self, digits: int) -> str:
        """How small a difference these prompts show, and how many prompts `SHARE` of vanilla's value needs."""
        shown = f"{reach(self.n, self.stderr or 0):.{digits}f}"
        text = f"{self.n:,} prompts show a difference of about {shown} with a probability of {100 * POWER:g} %"
        if not self.vanilla:
            return text
        size = SHARE * abs(self.vanilla)
        needed = pairs_for(size, self.n, self.stderr or 0)
        return f"{text}; {100 * SHARE:g} % of vanilla's value ({size:.{digits}f}) needs about {needed:,} prompts"

    def _size(self, end: float, digits: int) -> str:
        """ "0.0091 (1 % of vanilla's)"."""
        text = f"{abs(end):.{digits}f}"
        if not self.vanilla:
            return text
        share = 100 * abs(end / self.vanilla)
        return f"{text} ({share:,.{0 if share >= 100 else 2}{'f' if share >= 100 else 'g'}} % of vanilla's)"


def differences(row: Row, columns: Iterable[str]) -> list[Difference]:
    """The differences that a row has in these columns of metrics."""
    return [
        Difference(
            name,
            row[name],
            row[name] - row[f"{name}_difference"],
            int(row["n"]),
            row[f"{name}_difference_stderr"],
            bias_of_difference(row, name),
        )
        for name in columns
        if row.get(name) is not None and row.get(f"{name}_difference") is not None
    ]


def several(differences: Iterable[Difference]) -> str:
    """A warning if several differences are tested; else ""."""
    tests = sum(difference.is_tested for difference in differences)
    if tests < 2:
        return ""
    return (
        f"{tests} metrics, each tested alone at the {100 * (1 - LEVEL):g} % level: specbench compare adjusts for this"
    )
