"""Whether other work disturbed a benchmark: the target's pass over one node is measured twice, in the steps of vanilla
AR and alone. Every cost that is relative to one node rests on it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from specbench.errors import RunError

#: Measurements until the two agree.
ATTEMPTS = 3
#: Steps from which on the spread of their times is known.
_FEWEST = 5
#: Relative difference that is no noise: a step's other parts leave the caches in another state.
_SYSTEMATIC = 0.05
#: Relative difference above which two measurements never agree, however noisy they are.
_MOST = 0.15


@dataclass(frozen=True)
class Bases:
    """Seconds of the target's pass over one node, several each: `steps` in the steps of vanilla AR, and `alone`."""

    steps: Sequence[float]
    alone: Sequence[float]

    @property
    def difference(self) -> float:
        """Of their medians, relative to the smaller one."""
        low, high = sorted((statistics.median(self.steps), statistics.median(self.alone)))
        return high / low - 1

    @property
    def noise(self) -> float | None:
        """The largest difference of measurements that nothing disturbed: three standard errors of both medians, and
        what is systematic. None: too few steps for their spread."""
        if len(self.steps) < _FEWEST:
            return None
        return min(_MOST, _SYSTEMATIC + 3 * math.hypot(_relative_error(self.steps), _relative_error(self.alone)))

    @property
    def agree(self) -> bool:
        return self.noise is None or self.difference <= self.noise

    def refusal(self) -> RunError:
        """Why there is no row."""
        steps, alone = (1e3 * statistics.median(some) for some in (self.steps, self.alone))
        return RunError(
            f"the target's pass over one token took {steps:.3g} ms in a step of vanilla decoding and {alone:.3g} ms"
            f" alone; they differ by {self.difference:.0%}, and their noise allows {self.noise or 0:.0%}. {ATTEMPTS}"
            " attempts disagreed, so this benchmark has no row: measure again while nothing else uses the machine"
        )


def _relative_error(samples: Sequence[float]) -> float:
    """The standard error of the median relative to it, from the interquartile range (of normal noise)."""
    low, _, high = statistics.quantiles(samples, n=4)
    return 1.253 * (high - low) / 1.349 / math.sqrt(len(samples)) / statistics.median(samples)
