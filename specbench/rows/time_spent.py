"""What one start of a run spent its time on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specbench.rows.journal import Record


@dataclass(frozen=True)
class TimeSpent:
    """Wall times, seconds since 1970: the start, the end of decoding (with loading), of scoring, and of the run."""

    began: float
    decoded: float
    scored: float
    ended: float

    def parts(
        self, method: str, records: Iterable[Record], sessions: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, float]:
        """Part -> seconds, which sum to the whole.

        Args:
            records: of the method and of vanilla AR, repeated timings included. Those of earlier starts do not count.
            sessions: the processes that decoded, see `memory.RunMemory`. Where several did at the same time, or a
                server, the seconds of images do not sum to wall time, and decoding is one part.
        """
        decoding, rest = self.decoded - self.began, self.ended - self.scored
        here = [r for r in records if r.done >= self.began]
        used = [sessions.get(name, {}) for name in {r.session for r in here}]
        parts: dict[str, float] = {}
        if here and all(r.request_s is None for r in here) and all(one.get("workers", 1) == 1 for one in used):
            parts = {"loading": sum(float(one.get("loaded_s") or 0) for one in used), "drafting": 0.0}
            for r in here:
                drafting, side = r.draft_s or 0.0, "vanilla" if r.is_baseline else method
                parts["drafting"] += drafting
                parts[side] = parts.get(side, 0.0) + r.text_s + r.decode_s + r.pixels_s - drafting
            parts["warm-up and statistics"] = decoding - sum(parts.values())
        else:
            parts["decoding"] = decoding
        return parts | {"scoring": self.scored - self.decoded, "the rest": rest}

    def sentence(self, method: str, records: Iterable[Record], sessions: Mapping[str, Mapping[str, Any]]) -> str:
        """The parts as text, without those that took next to nothing."""
        parts = self.parts(method, records, sessions)
        each = ", ".join(f"{name} {_seconds(spent)}" for name, spent in parts.items() if spent >= _LEAST)
        return f"{_seconds(self.ended - self.began)} s" + (f": {each}" if each else "")


_LEAST = 0.05  # seconds, shown as 0.1


def _seconds(spent: float) -> str:
    return f"{spent:,.0f}" if spent >= 10 else f"{spent:.1f}"
