"""Scores the images of a run or of a folder. A score that exists in the journal is not computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from specbench import metrics
from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.data import Item
from specbench.errors import UsageError
from specbench.harness.folder import RunRecords
from specbench.harness.log import say
from specbench.metrics.base import Images, PromptItem
from specbench.rows import provenance
from specbench.rows.columns import TAKEN
from specbench.rows.journal import Journal, Record
from specbench.rows.scores import Score, ScoreJournal, ScoreLine, Side, images_fingerprint, prompts_fingerprint
from specbench.storage import origin
from specbench.storage.package import __version__


@dataclass(frozen=True)
class Request:
    """A metric that a row asks for. fingerprint: everything that determines its value besides the images and prompts,
    or why it has no value here; is_measurable: which of the two."""

    fingerprint: str
    is_measurable: bool = True


def scoring_device(device: str) -> str:
    """The device of the metrics' networks for device=...; UsageError if it does not exist."""
    from specbench.harness.pipeline import resolve_device

    resolved = str(resolve_device(device))
    return "cpu" if resolved == "mps" else resolved  # mps has no float64


def request(name: str, context: metrics.ScoringContext) -> Request:
    """The request for a metric. UsageError if a plug-in's metric fills a column with another meaning."""
    if reserved := TAKEN.intersection(parameters.metric_columns(name)):
        raise UsageError(f"metric {name} fills the column {min(reserved)}, which every row has already; rename it")
    try:
        return Request(metrics.metric(name, context).fingerprint())
    except metrics.Unavailable as e:
        return Request(str(e), is_measurable=False)


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
    """The images to score, paired by position with the items that `load` returns, and the fingerprints of both."""

    side: Side
    images: Images
    load: Callable[[], Sequence[PromptItem]]
    fingerprint: str
    prompts: str

    @property
    def items(self) -> Sequence[PromptItem]:
        return self.load()


def of_records(side: Side, journal: Journal, records: Sequence[Record], load: Callable[[], Sequence[Item]]) -> ImageSet:
    """The images of a pass over the prompts; load: returns the item of each."""
    images = RecordedImages(journal, records)
    return ImageSet(side, images, load, images_fingerprint(images.digests), prompts_fingerprint(records))


def requests(cfg: RunConfig) -> dict[str, Request]:
    """Metric -> its request today, of the metrics that a configuration asks for."""
    context = metrics.scoring_context(cfg)
    return {name: request(name, context) for name in cfg.metrics}


def joined(earlier: Sequence[str], requested: Sequence[str]) -> list[str]:
    """The metrics of a row, then the requested ones. A requested metric replaces one that fills the same column."""
    columns = {column for name in requested for column in parameters.metric_columns(name)}
    kept = [name for name in earlier if name in requested or not columns.intersection(parameters.metric_columns(name))]
    return [*kept, *(name for name in requested if name not in kept)]


class Scoring:
    """The requested scores of the images in a folder. `added`: how many lines were new.

    Args:
        cfg: the parameters of the scoring context.
        requests: see the function `requests`.
        folder: contains scores.jsonl and the cached outputs of the scorers.
        device, batch: where the networks run, and how many images at a time.
    """

    def __init__(
        self,
        cfg: metrics.References,
        requests: Mapping[str, Request],
        folder: Path,
        device: str,
        batch: int | None = None,
    ) -> None:
        self._cfg, self._requests = cfg, requests
        self._where = device, batch or metrics.ScoringContext.batch
        self.journal, self.cache = ScoreJournal(folder / "scores.jsonl"), metrics.Outputs(folder)
        self.added = 0

    def lines(self, records: RunRecords, load: Callable[[], Sequence[Item]]) -> list[ScoreLine]:
        """The score lines of a run's images and, if the run has a baseline, of their differences from it.
        load: returns the item of each image."""
        if not self._requests:
            return []
        records_of_method, vanilla = records.wanted_records
        load = cache(load)  # which may draw or read the prompts
        method = of_records("method", records.method, records_of_method, load)
        lines = self.score(method)
        if records.vanilla is None or vanilla is None:
            return list(lines.values())
        baseline = of_records("vanilla", records.vanilla, vanilla, load)
        return [*lines.values(), *self._differences(method, baseline, lines, self.score(baseline))]

    def score(self, image_set: ImageSet) -> dict[str, ScoreLine]:
        """Metric -> its line with today's fingerprint; a missing line is computed and appended. For a metric that
        cannot be measured here, the newest line with a value."""
        lines = {}
        for name, wanted in self._requests.items():
            key = image_set.side, image_set.fingerprint, image_set.prompts
            if (line := _stored_line(self.journal, name, wanted, key)) is not None:
                lines[name] = line
        if todo := [name for name in self._requests if name not in lines]:
            say(f"scoring{' the baseline' if image_set.side == 'vanilla' else ''}: {', '.join(todo)}")
            scores = metrics.score(todo, image_set.images, image_set.items, self._context(), self.cache)
            for name in todo:
                columns = {column: scores[column] for column in parameters.metric_columns(name)}
                lines[name] = self._append(name, image_set.side, image_set, image_set.fingerprint, columns)
        return {name: lines[name] for name in self._requests}

    def _differences(
        self,
        method: ImageSet,
        baseline: ImageSet,
        scored: Mapping[str, ScoreLine],
        vanilla: Mapping[str, ScoreLine],
    ) -> Iterator[ScoreLine]:
        """The method's values minus vanilla AR's on the same prompts, for metrics that scored both the same
        way."""
        images = images_fingerprint([method.fingerprint, baseline.fingerprint])
        for name, line in scored.items():
            other = vanilla[name]
            if not (line.is_measured and other.is_measured) or line.fingerprint != other.fingerprint:
                continue
            difference = self.journal.newest(name, "difference", images, method.prompts, line.fingerprint)
            if difference is None and self._requests[name].fingerprint == line.fingerprint:
                stderr = metrics.difference_stderr(name, method, baseline, self._context(), self.cache)
                columns = _minus(line.columns, other.columns, stderr)
                difference = self._append(name, "difference", method, images, columns)
            if difference is not None:
                yield difference

    def _context(self) -> metrics.ScoringContext:
        device, batch = self._where
        return metrics.scoring_context(self._cfg, scoring_device(device), batch)

    @cached_property
    def _commit(self) -> str:
        return origin.commit()

    def _append(
        self, name: str, side: Side, image_set: ImageSet, images: str, columns: Mapping[str, Score]
    ) -> ScoreLine:
        """Appends a line to the journal; images: the fingerprint."""
        plugins = parameters.plugins_of({"metrics": [name]})
        fingerprint, count = self._requests[name].fingerprint, len(image_set.images)
        origins = plugins, __version__, self._commit
        line = ScoreLine(name, side, count, images, image_set.prompts, fingerprint, columns, *origins, provenance.utc())
        self.journal.add(line)
        self.added += 1
        return line


def _minus(method: Mapping[str, Score], baseline: Mapping[str, Score], stderr: float | None) -> dict[str, Score]:
    """The differences of some columns; stderr: of the first one."""
    differences = {}
    for column, score in method.items():
        other = baseline[column].value
        value = None if score.value is None or other is None else score.value - other
        differences[column] = Score(value, None if value is None else stderr, score.backend)
        stderr = None
    return differences


def _stored_line(journal: ScoreJournal, name: str, wanted: Request, key: tuple[Side, str, str]) -> ScoreLine | None:
    """The stored line for a request: the one with today's fingerprint or, if the metric cannot be measured here, the
    newest one with a value. key: the side, and the fingerprints of images and prompts."""
    measured = None if wanted.is_measurable else journal.newest(name, *key)
    return measured or journal.newest(name, *key, wanted.fingerprint)


def stored_lines(
    requests: Mapping[str, Request], journal: ScoreJournal, records: Sequence[Record], vanilla: Sequence[Record] | None
) -> list[ScoreLine]:
    """The stored lines for a request, for the images of some records and for their differences from vanilla AR.
    Computes none. If no line has today's fingerprint, the newest line with a value is used."""
    images, prompts = images_fingerprint(r.sha256 for r in records), prompts_fingerprint(records)
    pair = None if vanilla is None else images_fingerprint([images, images_fingerprint(r.sha256 for r in vanilla)])
    lines = []
    for name, wanted in requests.items():
        key: tuple[Side, str, str] = "method", images, prompts
        line = _stored_line(journal, name, wanted, key) or journal.newest(name, *key)
        if line is not None:
            lines.append(line)
            difference = pair and journal.newest(name, "difference", pair, prompts, line.fingerprint)
            lines += [difference] if difference else []
    return lines
