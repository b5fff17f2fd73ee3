"""One run, from its configuration to its row: prompts -> images with one record each -> scores -> one row.

    outcome = run(configuration.compose(["method=cool_sd", "delta=1.1", "n=16"]), "first")

The folder of a run has append-only journals: records.jsonl, baseline.jsonl, scores.jsonl and, for images that were
decoded again for their seconds, timings.jsonl. Every image has a record (see `rows.journal`), and the key of its random
stream is (seed, prompt index). The same configuration in the same folder therefore continues where it stopped, and
produces the same images as an uninterrupted run. The row is a pure function of the configuration and the journals (see
`harness.row`). row.csv contains only this row, and may be deleted at any time.

Later requests in the same folder may change `n`, the metrics and `baseline`. The row then answers the new request, and
the images and scores of earlier requests stay in the journals. A change of the prompts, or of any other parameter
except `provenance.MAY_CHANGE`, would mix two measurements in one row and is refused. prompt_length may grow where it
changes no image.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbench import data
from specbench.config import indices, missing_weights, parameters, registry
from specbench.config.run_config import RunConfig
from specbench.errors import MissingFilesError, RunError, UsageError
from specbench.harness import cluster, contact_sheet, row, scoring
from specbench.harness.execution import Execution
from specbench.harness.folder import (
    RunFolder,
    RunRecords,
    current_prompts,
    new_folder,
    recorded_prompts,
    stored,
)
from specbench.harness.log import LOG, say
from specbench.harness.scoring import Request, Scoring
from specbench.harness.worker import Loader
from specbench.rows import remark, report_text, timing, trackers
from specbench.rows.columns import Row
from specbench.rows.csv_files import as_read
from specbench.rows.journal import Record, TimingJournal, read_of
from specbench.rows.provenance import DecodingProcess
from specbench.rows.scores import ScoreLine
from specbench.storage import home
from specbench.storage.files import sha256_file

if TYPE_CHECKING:
    from specbench.harness.pipeline import BasePipeline


class Stopped(KeyboardInterrupt):
    """The user stopped a run. The message states its progress and its folder."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


@dataclass(frozen=True)
class RunOutcome:
    """A finished run. row: `COLUMNS` -> value; nothing_left: whether everything existed before; spent: the times of the
    parts of this start, as text."""

    row: Row
    config: RunConfig
    folder: RunFolder
    nothing_left: bool = False
    spent: str = ""

    def report(self) -> str:
        """The key values of the row as text, and the paths of the files."""
        files = f"{self.folder.row}, {self.folder.sheet.name}" + (f"; time spent {self.spent}" if self.spent else "")
        lines = [report_text.report(self.row, self.config), report_text.line("files", files)]
        if self.nothing_left:
            lines.insert(0, f"nothing left to do: {self.config.images} images and their row are in {self.folder}")
        return "\n".join(lines)


def run(
    config: RunConfig, out: str | Path | None = None, *, loader: Loader | None = None, asked: bool = False
) -> RunOutcome:
    """Runs a configuration in its folder, or the part of it that is missing there.

    Args:
        config: the result of `configuration.compose`.
        out: the run's folder. Default: `config.out`, or a new folder under runs/ if that is None, too.
        loader: makes the pipeline. Default: `specbench.harness.pipeline.Pipeline.load`.
        asked: whether the metrics were requested by name, which `specbench resume` needs to know.

    Raises UsageError for missing weights or prompts and for a folder with other content, RunError if the disk or the
    memory was too small, and Stopped on Ctrl-C: the first one finishes the current image and writes a row over the
    finished images, the second one stops at once.
    """
    folder = RunFolder(home.expanded(out or config.out or new_folder()))
    new = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    loader = loader or _load_pipeline
    with folder.opened():
        start: Start | None = None
        try:
            start = prepare(config, folder, has_own_weights=loader is not _load_pipeline)
            outcome = _run(config, folder, start, loader, asked)
            _track(outcome)
            return outcome
        except KeyboardInterrupt:
            if start is None:
                raise
            done = start.records.progress
            LOG.info("stopped by the user with %s", done)
            part = _write_partial_row(config, folder, start.records)
            text = f"; the row over the first {part} is in its row.csv" if part else ""
            raise Stopped(f"stopped with {done} done in {folder}{text}", folder.path) from None
        except (UsageError, RunError) as e:
            if start is not None:  # a refused start changes nothing in the folder
                LOG.error("%s", e)
            if isinstance(e, UsageError) and new and not (start and start.records.method.records):
                _remove(new)
            raise
        except Exception as e:
            LOG.exception("cannot write" if folder.disk_fault(e) else "failed")
            raise


def _run(config: RunConfig, folder: RunFolder, start: Start, loader: Loader, asked: bool) -> RunOutcome:
    """Decodes the missing images, scores them, and writes the row."""
    began, records, items = time.time(), start.records, start.items
    folder.write_config(config)
    parameters.remember_included(folder.path)
    if asked != folder.metadata().asked:
        folder.update_metadata(asked=asked)
    if start.decodes:
        _announce_unmeasured(start.requests)
        items = items or recorded_prompts(records.wanted_records[0], config)
        Execution(config, folder, loader).decode_missing(records, items)
    decoded, scorer = time.time(), Scoring(config, start.requests, folder.path, config.device)
    lines = scorer.lines(records, lambda: items or data.images_of(config))
    scored = time.time()
    outcome = _finish(config, folder, records, lines, not start.decodes and not scorer.added)
    if outcome.nothing_left:
        return outcome
    made = [*records.again, *(record for journal in records.journals for record in journal.records.values())]
    spent = report_text.TimeSpent(began, decoded, scored, time.time())
    return replace(outcome, spent=spent.sentence(config.method, made, folder.metadata().sessions))


@dataclass(frozen=True)
class Start:
    """What a run finds when it starts: the records in its folder, its prompts, one per image ([]: a complete run whose
    file of prompts is gone), and its metrics with their requests. decodes: whether images are missing, or are to be
    timed again."""

    records: RunRecords
    items: list[data.Item]
    requests: Mapping[str, Request]
    decodes: bool


def prepare(
    config: RunConfig,
    folder: RunFolder,
    has_own_weights: bool = False,
    dry: bool = False,
    load: Callable[[RunConfig], list[data.Item]] = data.images_of,
) -> Start:
    """Makes every check that a run makes before it loads a model, and changes nothing.

    Args:
        config, folder: of the run; the folder need not exist.
        has_own_weights: a custom loader makes the pipeline, so that no weights are needed.
        dry: a dry run, which may be on another machine than the run: a GPU may be missing, and weights or data that are
            missing are reported after every mistake.
        load: reads the prompts.

    Raises UsageError, and MissingFilesError for weights or data that are not here.
    """
    _check_libraries(config)
    folder.check_ours()
    folder.compare_config(config)
    records = folder.open_records(config)
    complete, requests = records.is_complete, scoring.requests(config)
    folder.open_scores()
    again = complete and timing.is_timed(config) and bool(records.to_time_again)  # an earlier start was stopped
    # A finished run must not continue with weights that were trained later. (A custom loader has its own weights.)
    if not has_own_weights and (here := registry.weights_here(config)) is not None:
        folder.check_same("weights", here)
    items: list[data.Item] = []
    missing: MissingFilesError | None = None
    try:
        items = current_prompts(config) if complete else load(config)
        records.check_prompts(items)
    except MissingFilesError as e:
        if not dry:
            raise
        missing = e
    if not complete or again:
        if not has_own_weights:
            check(config, elsewhere=dry)
            if missing is None:
                check_prompts(config, items)
        if not dry:  # which needs no network
            cluster.check_address(config)
    if missing is not None:
        raise missing
    return Start(records, items, requests, not complete or again)


def _remove(new: Sequence[Path]) -> None:
    """Removes the folder of a run that could not start, and the folders above it that were made for it."""
    shutil.rmtree(new[0])
    with suppress(OSError):  # another run has put something there
        for path in new[1:]:
            path.rmdir()


@dataclass(frozen=True)
class Rescoring:
    """What changes in the scoring of a run: further metrics, and new values of `metrics_dir` and `reference`, by
    name."""

    metrics: Sequence[str] = ()
    changed: Mapping[str, str | None] = field(default_factory=dict)

    def of(self, config: RunConfig) -> RunConfig:
        """A run's configuration with these changes. UsageError for a metric that has no meaning for its model."""
        parameters.check_measurable(config.model, self.metrics)
        metrics = scoring.joined(config.metrics, self.metrics or config.metrics)
        return config.changed(metrics=metrics, **self.changed)


def rescore(path: Path, rescoring: Rescoring, device: str | None = None, batch: int | None = None) -> RunOutcome:
    """Scores the images of a run in a folder, and builds its row again. Decodes nothing, and needs only the
    weights of the metrics. device, batch: where the networks run, and how many images at a time.

    Raises UsageError if images are missing.
    """
    config, folder = rescoring.of(stored(path)), RunFolder(path)
    with folder.opened():
        records = _complete_records(folder, config)
        items = current_prompts(config) or recorded_prompts(records.wanted_records[0], config)
        records.check_prompts(items)
        scorer = Scoring(config, scoring.requests(config), folder.path, device or config.device, batch)
        folder.write_config(config)
        return _finish(config, folder, records, scorer.lines(records, lambda: items), not scorer.added)


def _complete_records(folder: RunFolder, config: RunConfig) -> RunRecords:
    """The records of a run. UsageError if an image is missing."""
    records = folder.open_records(config)
    for journal in records.journals:
        if missing := journal.missing(records.wanted):
            raise UsageError(
                f"{folder} has {config.images - len(missing)} of the {config.images} images in {journal.path.name}:"
                f" finish it first with specbench resume {folder}"
            )
    return records


def merge(shards: Sequence[Path], out: Path, rescoring: Rescoring) -> RunOutcome:
    """Makes one run of the finished shards of a run, in a new folder or in one that an interrupted merge left.

    The records come from the shards, in the order of the prompts; the images are scored as a whole. Raises UsageError,
    before anything is written, if the shards are not all the finished parts of one run, or if `out` holds another run.
    """
    shards = list(dict.fromkeys(shards))
    configs = [stored(path) for path in shards]
    whole = _whole(shards, configs)
    metadata = [RunFolder(path).metadata() for path in shards]
    sessions = {name: session for part in metadata for name, session in part.sessions.items()}
    for name in ("weights", "device"):
        if len(different := sorted({str(getattr(process, name)) for process in sessions.values()})) > 1:
            raise UsageError(f"the shards were decoded with different {name}: {' and '.join(different[:2])}")
    parts = {path: _complete_records(RunFolder(path), config) for path, config in zip(shards, configs)}
    owners = {index: path for path, records in parts.items() for index in records.wanted}
    again = [record for records in parts.values() for record in records.again]
    prompts = current_prompts(whole)
    for records in parts.values():
        records.check_prompts(prompts)
    folder = RunFolder(out)
    if folder.config.exists():  # an earlier merge, whose scores stay
        earlier = folder.read_config().get("metrics") or ()
        whole = whole.changed(metrics=scoring.joined(whole.metrics, earlier))
    scoring.requests(rescoring.of(whole))
    new = [path for path in (out, *out.parents) if not path.exists()]
    with folder.opened():
        merged = _records_of_merge(folder, whole, sessions)
        smallest = min((part.smallest_batch for part in metadata if part.smallest_batch), default=None)
        folder.update_metadata(sessions=sessions, smallest_batch=smallest)
        folder.write_config(whole)
        try:
            for i, journal in enumerate(merged.journals):
                for index in sorted(owners, key=lambda index: (indices.prompt_of(index), index)):
                    if index not in journal:
                        source = parts[owners[index]].journals[i]
                        journal.add(source.records[index], source.image(index))
        except UsageError:  # an image of a shard was changed
            if new:
                _remove(new)
            raise
        for record in again:
            if record not in merged.again.lines:
                merged.again.add(record)
    return rescore(out, rescoring)


def _records_of_merge(folder: RunFolder, whole: RunConfig, sessions: Mapping[str, DecodingProcess]) -> RunRecords:
    """The records in the folder of a merge. UsageError if it has records of other processes than the shards, or is a
    shard itself."""
    folder.compare_config(whole)
    if folder.config.exists() and (shard := folder.read_config().get("shard")):
        raise UsageError(f"{folder} is the shard {shard}, which would become the whole run; choose another out=")
    if folder.metadata().sessions.keys() - sessions.keys():
        raise UsageError(f"{folder} holds a run that is no merge of these shards; choose another out=")
    return folder.open_records(whole)


def _whole(shards: Sequence[Path], configs: Sequence[RunConfig]) -> RunConfig:
    """The configuration of the run whose shards these are. UsageError if one is missing or belongs to another run."""
    whole = configs[0].changed(shard=None)
    for path, config in zip(shards, configs):
        if config.shard is None:
            raise UsageError(f"{path} is not a shard: its run decoded all prompts")
        if names := sorted(
            name for name, value in whole.plain().items() if name != "shard" and config.get(name) != value
        ):
            raise UsageError(f"{shards[0]} and {path} belong to different runs: they differ in {', '.join(names)}")
    parts = int(str(configs[0].shard).partition("/")[2])
    wanted = {f"{part}/{parts}" for part in range(1, min(parts, whole.n) + 1)}
    if missing := wanted.difference(config.shard for config in configs):
        raise UsageError(f"shard {min(missing)} is missing: name the folders of all {len(wanted)} shards")
    if len(configs) > len(wanted):
        raise UsageError(f"{len(configs)} folders for {len(wanted)} shards: name each shard once")
    return whole


def stored_outcome(path: str | Path) -> RunOutcome:
    """The finished run in a folder. Its row is computed from the journals and their newest scores; no image is read.
    UsageError if records are missing."""
    folder = RunFolder(home.expanded(path))
    config = stored(folder.path)
    method = _recorded(folder.records, config)
    vanilla = _recorded(folder.baseline_records, config) if config.wants_baseline else None
    lines = scoring.stored_lines(scoring.requests(config), folder.open_scores(), method, vanilla)
    again = TimingJournal(folder.timings).lines
    return RunOutcome(as_read(row.row(config, folder.metadata(), method, vanilla, lines, again)), config, folder)


def _recorded(path: Path, config: RunConfig) -> list[Record]:
    """The records of the images of a configuration. UsageError if some are missing."""
    records = read_of(path, indices.of_run(config))
    if records is None:
        raise UsageError(f"{path.parent} holds no row: finish its run with `specbench resume {path.parent}`")
    return records


def _finish(
    config: RunConfig, folder: RunFolder, records: RunRecords, lines: Sequence[ScoreLine], unchanged: bool
) -> RunOutcome:
    """Builds the row, and writes it and the sheet. unchanged: whether nothing was decoded or scored."""
    # The row with the values that a later call would return.
    columns = as_read(row.row(config, folder.metadata(), *records.wanted_records, lines, records.again.lines))
    is_new = folder.write_row(columns)
    unchanged = unchanged and not is_new and folder.sheet.exists()
    if unchanged:
        LOG.info("nothing left to do")
    else:
        cells = contact_sheet.cells(config.method, records)
        title, quality = report_text.title(columns, config, len(cells)), report_text.quality(columns, config)
        contact_sheet.save(folder.sheet, title, cells, quality)
        LOG.info("row written to %s", folder.row)
    return RunOutcome(columns, config, folder, unchanged)


def _write_partial_row(config: RunConfig, folder: RunFolder, records: RunRecords) -> int:
    """Writes the row of a stopped run over the prompts before the first missing image, with the scores that exist.
    Returns the number of its images; 0 if row.csv did not change. The row equals the row of a run with this n, without
    a baseline if images of the baseline are missing."""
    missing = records.method.missing(records.wanted)
    part = config.changed(n=indices.prompt_of(missing[0]) if missing else config.n)
    wanted = indices.of_run(part)
    if not wanted or not folder.config.exists():
        return 0
    records = replace(records, wanted=wanted)
    if records.vanilla is not None and records.vanilla.missing(wanted):
        part, records = part.changed(baseline=False), replace(records, vanilla=None)
    method, vanilla = records.wanted_records
    lines = scoring.stored_lines(scoring.requests(config), folder.open_scores(), method, vanilla)
    scored = [name for name in config.metrics if any(line.metric == name for line in lines)]
    part = part.changed(metrics=scored)
    columns = row.row(part, folder.metadata(), method, vanilla, lines, records.again.lines)
    if len(wanted) < config.images:
        stopped = remark.remark("stopped", done=len(wanted), images=config.images)
        columns["remarks"] = [*remark.as_json([stopped]), *(columns["remarks"] or [])]
    return len(wanted) if folder.write_row(columns) else 0


def _track(outcome: RunOutcome) -> None:
    """Sends the row to the tracker of the configuration, unless it has this row already."""
    name, folder = outcome.config.log, outcome.folder
    if name == "none":
        return
    done, content = folder.metadata().logged, sha256_file(folder.row)[:16]
    if done.get(name) == content:
        return
    where = trackers.write(name, outcome.config, outcome.row, folder)
    folder.update_metadata(logged={**done, name: content})
    say(f"log={name}: {where}")


def _announce_unmeasured(requests: Mapping[str, Request]) -> None:
    """Prints before the work starts which metrics will have no value."""
    for name, request in requests.items():
        if not request.is_measurable:
            say(f"{name} cannot be measured here: {request.fingerprint}")


def _load_pipeline(cfg: RunConfig) -> BasePipeline:
    from specbench.harness.pipeline import Pipeline

    check(cfg)  # on the machine of a worker
    return Pipeline.load(cfg)


def _check_libraries(cfg: RunConfig) -> None:
    """Raises UsageError if a library that the run needs is not installed."""
    trackers.check(cfg)
    cluster.check(cfg)


def check_inputs(cfg: RunConfig) -> None:
    """Raises UsageError for every mistake in a configuration and its prompts that shows before a model is loaded, and
    MissingFilesError for weights and data that are not here."""
    _check_libraries(cfg)
    items = data.images_of(cfg)
    check(cfg)
    check_prompts(cfg, items)


def check(cfg: RunConfig, elsewhere: bool = False) -> None:
    """Raises UsageError for mistakes in a configuration that show before a model is loaded: a bad tree, a missing
    device; and after them MissingFilesError for missing weights. elsewhere: a GPU may be missing here."""
    import torch

    from specbench.harness import method
    from specbench.harness.pipeline import check_engine, engine_of, resolve_device

    method.check(cfg)
    if elsewhere and cfg.device != "cpu" and not torch.cuda.is_available():
        check_engine(cfg)
    else:
        engine_of(cfg, resolve_device(cfg.device))
    missing_weights.check(cfg)


def check_prompts(cfg: RunConfig, items: Sequence[data.Item]) -> None:
    """Raises UsageError for prompts that the model cannot read, such as too long ones. Needs the files of its text
    tokenizer, but loads no network."""
    check_all = getattr(registry.find("model", cfg.model), "check_prompts", None)  # optional in a plug-in's model
    if check_all is not None:
        check_all(cfg, items)
