"""The scoring of a run's or a folder's images. A score that exists in the journal is not computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specbench import metrics
from specbench.config import parameters
from specbench.data import Item
from specbench.errors import UsageError
from specbench.harness.folder import RunRecords
from specbench.harness.log import say
from specbench.metrics.base import Images, PromptItem
from specbench.rows import provenance
from specbench.rows.columns import TAKEN
from specbench.rows.journal import Journal, Record
from specbench.rows.scores import Score, ScoreJournal, ScoreLine, Side, fingerprint, prompts_fingerprint
from specbench.storage import origin
from specbench.storage.package import __version__

_UNMEASURED = "cannot be measured here: "


def scoring_device(device: str) -> str:
    """The device of the metrics' networks for device=...; UsageError for an absent device."""
    from specbench.harness.pipeline import resolve_device

    found = str(resolve_device(device))
    return "cpu" if found == "mps" else found  # mps has no float64


def basis(name: str, context: metrics.ScoringContext) -> str:
    """What determines the value of a metric besides the images and prompts, or the reason why it has none here.
    UsageError for a metric of a plug-in that fills a column of another meaning."""
    if taken := TAKEN.intersection(parameters.metric_columns(name)):
        raise UsageError(f"metric {name} fills the column {min(taken)}, which every row has already; rename it")
    try:
        return metrics.metric(name, context).basis()
    except metrics.Unavailable as e:
        return f"{_UNMEASURED}{e}"


def is_unmeasured(basis: str) -> bool:
    return basis.startswith(_UNMEASURED)


class RecordedImages:
    """The images of some records of a journal, each read when it is needed."""

    def __init__(self, journal: Journal, records: Sequence[Record]) -> None:
        self._journal, self._records = journal, records
        self.digests = [record.sha256 for record in records]

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._journal.image(self._records[index].index)


@dataclass(frozen=True)
class ImageSet:
    """What is scored: images, paired by position with the items that `load` gives, and the fingerprints of both."""

    side: Side
    images: Images
    load: Callable[[], Sequence[PromptItem]]
    fingerprint: str
    prompts: str

    @property
    def items(self) -> Sequence[PromptItem]:
        return self.load()


def of_records(side: Side, journal: Journal, records: Sequence[Record], load: Callable[[], Sequence[Item]]) -> ImageSet:
    """The images of a pass over the prompts; load: gives the item of each."""
    images = RecordedImages(journal, records)
    return ImageSet(side, images, load, fingerprint(images.digests), prompts_fingerprint(records))


def requests(cfg: Mapping[str, Any]) -> dict[str, str]:
    """Metric -> its basis today, of the metrics that a configuration asks for."""
    context = metrics.scoring_context(cfg)
    return {name: basis(name, context) for name in cfg["metrics"]}


def joined(had: Sequence[str], requested: Sequence[str]) -> list[str]:
    """Metrics of a row and requested ones, which win the columns that both fill. The earlier ones keep their order."""
    taken = {column for name in requested for column in parameters.metric_columns(name)}
    kept = [name for name in had if name in requested or not taken.intersection(parameters.metric_columns(name))]
    return [*kept, *(name for name in requested if name not in kept)]


class Scoring:
    """The scores that are asked for, of images in a folder. `added`: how many lines were new.

    Args:
        cfg: the parameters of the scoring context, and `device`.
        requests: see the function `requests`.
        folder: whose scores.jsonl and whose cached outputs of scorers are used.
        device, batch: where the networks run, and how many images at a time.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any],
        requests: Mapping[str, str],
        folder: Path,
        device: str | None = None,
        batch: int | None = None,
    ) -> None:
        self._cfg, self._requests = cfg, requests
        self._where = device or cfg["device"], batch or metrics.ScoringContext.batch
        self.journal, self.cache = ScoreJournal(folder / "scores.jsonl"), metrics.Outputs(folder)
        self.added = 0

    def lines(self, records: RunRecords, load: Callable[[], Sequence[Item]]) -> list[ScoreLine]:
        """The score lines of a run's images and of their differences from the baseline, which is scored, too.
        load: gives the item of each image."""
        if not self._requests:
            return []
        mine, vanilla = records.both
        load = cache(load)  # which may draw or read the prompts
        method = of_records("method", records.method, mine, load)
        lines = self.score(method)
        if records.vanilla is None or vanilla is None:
            return list(lines.values())
        baseline = of_records("vanilla", records.vanilla, vanilla, load)
        return [*lines.values(), *self._differences(method, baseline, lines, self.score(baseline))]

    def score(self, of: ImageSet) -> dict[str, ScoreLine]:
        """Metric -> its line: that of today's basis, which is computed and appended if it is not there. Where the
        metric cannot be measured here, it is the newest one with a value."""
        found = {}
        for name, text in self._requests.items():
            if (line := _known(self.journal, name, text, (of.side, of.fingerprint, of.prompts))) is not None:
                found[name] = line
        if todo := [name for name in self._requests if name not in found]:
            say(f"scoring{' the baseline' if of.side == 'vanilla' else ''}: {', '.join(todo)}")
            scores = metrics.score(todo, of.images, of.items, self._context(), self.cache)
            for name in todo:
                columns = {column: scores[column] for column in parameters.metric_columns(name)}
                found[name] = self._append(name, of.side, of, of.fingerprint, columns)
        return {name: found[name] for name in self._requests}

    def _differences(
        self, mine: ImageSet, theirs: ImageSet, scored: Mapping[str, ScoreLine], vanilla: Mapping[str, ScoreLine]
    ) -> Iterator[ScoreLine]:
        """The method's values minus vanilla AR's over the same prompts, of the metrics that measured both alike."""
        both = fingerprint([mine.fingerprint, theirs.fingerprint])
        for name, line in scored.items():
            other = vanilla[name]
            if not (line.is_measured and other.is_measured) or line.basis != other.basis:
                continue
            known = self.journal.newest(name, "difference", both, mine.prompts, line.basis)
            if known is None and self._requests[name] == line.basis:
                stderr = metrics.difference_stderr(name, mine, theirs, self._context(), self.cache)
                columns = _minus(line.columns, other.columns, stderr)
                known = self._append(name, "difference", mine, both, columns)
            if known is not None:
                yield known

    def _context(self) -> metrics.ScoringContext:
        device, batch = self._where
        return metrics.scoring_context(self._cfg, scoring_device(device), batch)

    @cached_property
    def _commit(self) -> str:
        return origin.commit()

    def _append(self, name: str, side: Side, of: ImageSet, images: str, columns: Mapping[str, Score]) -> ScoreLine:
        """A new line of the journal."""
        plugins = parameters.plugins_of({"metrics": [name]})
        basis, count = self._requests[name], len(of.images)
        by = plugins, __version__, self._commit
        line = ScoreLine(name, side, count, images, of.prompts, basis, columns, *by, provenance.utc())
        self.journal.add(line)
        self.added += 1
        return line


def _minus(mine: Mapping[str, Score], theirs: Mapping[str, Score], stderr: float | None) -> dict[str, Score]:
    """The differences of some columns; stderr: of the first one."""
    found = {}
    for column, one in mine.items():
        other = theirs[column].value
        value = None if one.value is None or other is None else one.value - other
        found[column] = Score(value, None if value is None else stderr, one.backend, "")
        stderr = None
    return found


def _known(journal: ScoreJournal, name: str, basis: str, of: tuple[Side, str, str]) -> ScoreLine | None:
    """The line that a request takes: with today's basis or, where the metric cannot be measured here, the newest one
    with a value. of: side and fingerprints of images and prompts."""
    measured = journal.newest(name, *of) if is_unmeasured(basis) else None
    return measured or journal.newest(name, *of, basis)


def stored_lines(
    requests: Mapping[str, str], journal: ScoreJournal, records: Sequence[Record], vanilla: Sequence[Record] | None
) -> list[ScoreLine]:
    """The lines that a request takes without computing any, of the images of some records and of their differences from
    vanilla AR. Where no line has today's basis, it is the newest one with a value."""
    mine, prompts = fingerprint(r.sha256 for r in records), prompts_fingerprint(records)
    both = None if vanilla is None else fingerprint([mine, fingerprint(r.sha256 for r in vanilla)])
    found = []
    for name, text in requests.items():
        line = _known(journal, name, text, ("method", mine, prompts)) or journal.newest(name, "method", mine, prompts)
        if line is not None:
            found.append(line)
            other = both and journal.newest(name, "difference", both, prompts, line.basis)
            found += [other] if other else []
    return found
