"""Scores: lines of an append-only journal, scores.jsonl. No line is replaced; each request chooses the lines it needs.

A line is the result of one metric for one set of images: its columns, and fingerprints of everything that determines
them. A score that is computed again with other images, weights or settings is another line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from specbench.rows.columns import METRICS, Columns
from specbench.rows.journal import AppendOnly, decode
from specbench.rows.remark import Remark, free, of_json
from specbench.storage.files import sha256

#: What a line scores: a method's images, the vanilla AR images of the same prompts, or the difference of the two.
Side = Literal["method", "vanilla", "difference"]


@dataclass(frozen=True)
class Score:
    """The result of one column.

    value: None if it was not measured; the first remark then gives the reason.
    stderr: standard error of `value` over images, or over prompts if these have several images; None if it cannot be
        estimated.
    backend: the scorer network, the hash of its weights and everything else that determines the value (resize, scale,
        prefix, reference), such as "scenes-reader@1a2b3c4d".
    remarks: on how to read the value; without a column, which is the score's.
    """

    value: float | None
    stderr: float | None
    backend: str
    remarks: Sequence[Remark] = ()

    @classmethod
    def unmeasured(cls, reason: Remark | str, backend: str = "") -> Score:
        """A score without a value; reason: a remark, or the words of an error."""
        return cls(None, None, backend, (free(reason) if isinstance(reason, str) else reason,))


@dataclass(frozen=True)
class ScoreLine:
    """A metric's scores of one side.

    n: number of images. images, prompts: their fingerprints (`images_fingerprint`, `prompts_fingerprint`). fingerprint:
    everything else that determines the values, as text (`Metric.fingerprint`), or why the metric has no values.
    plugins: labels of the plug-ins that scored; specbench, commit: version and commit of the code. time: UTC.
    """

    metric: str
    side: Side
    n: int
    images: str
    prompts: str
    fingerprint: str
    columns: Mapping[str, Score]
    plugins: Sequence[str]
    specbench: str
    commit: str
    time: str

    @property
    def is_measured(self) -> bool:
        """Whether at least one column has a value."""
        return any(score.value is not None for score in self.columns.values())


class ScoreJournal(AppendOnly[ScoreLine]):
    """The scores of a folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, lambda line: _line(decode(line)), "a score")

    def newest(
        self, metric: str, side: Side, images: str, prompts: str, fingerprint: str | None = None
    ) -> ScoreLine | None:
        """The newest line of a metric for these images: with this fingerprint or, if it is None, with a value."""
        for line in reversed(self.lines):
            of_images = (line.metric, line.side, line.images, line.prompts) == (metric, side, images, prompts)
            if of_images and (line.is_measured if fingerprint is None else line.fingerprint == fingerprint):
                return line
        return None


def _line(values: Mapping[str, Any]) -> ScoreLine:
    columns = {
        str(name): Score(**{**fields, "remarks": of_json(fields["remarks"])})
        for name, fields in values["columns"].items()
    }
    return ScoreLine(**{**values, "columns": columns})


class _Prompted(Protocol):
    @property
    def prompt(self) -> str: ...
    @property
    def id(self) -> str: ...


def images_fingerprint(digests: Iterable[str | None]) -> str:
    """Identifies images by their digests, in order."""
    return sha256(" ".join(digest or "" for digest in digests), 16)


def prompts_fingerprint(items: Iterable[_Prompted]) -> str:
    """Identifies the prompts of images with their ids, in order."""
    return sha256("\n".join(f"{item.id}\t{item.prompt}" for item in items), 16)


def score_columns(scores: Iterable[ScoreLine]) -> Columns:
    """The columns of some scores."""
    columns: Columns = {}
    for line in scores:
        for name, score in line.columns.items():
            if line.side == "difference":
                columns |= {f"{name}_difference": score.value, f"{name}_difference_stderr": score.stderr}
            else:
                columns |= {name: score.value, f"{name}_stderr": score.stderr, f"{name}_backend": score.backend or None}
    return columns


def score_remarks(scores: Iterable[ScoreLine]) -> list[Remark]:
    """The remarks on how to read scores, in the order of the columns."""
    by_column = {name: score.remarks for line in scores for name, score in line.columns.items() if score.remarks}
    return [remark.about(name) for name in METRICS for remark in by_column.get(name, ())]
