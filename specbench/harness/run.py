"""One run, from its checked configuration to its row: prompts -> images and a record each -> metrics -> one row.

    row = execute(configuration.compose(["method=cool_sd", "delta=1.1", "n=16"]), "first")

The folder of a run is its memory. Every image has a record (see `rows.journal`), and the key of its random stream is
(seed, prompt index). The same configuration in the same folder therefore continues where it stopped and ends with the
images of an uninterrupted run. `n`, `metrics` with their inputs, and `baseline` may change between two runs in one
folder, and the row loses nothing (see `merge`): a larger n adds prompts, other metrics join those of the row,
`baseline=false` leaves the speed-ups where the baseline's images exist, and values that no longer hold are computed
again or named. A smaller n shows its row and leaves row.csv over the larger one. Other prompts, and any other parameter
but `data_dir`, would mix two measurements in one row, and are refused. The folder also caches the per-image outputs of
the metrics' networks (see `metrics.outputs`).
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench import data, metrics
from specbench.config import parameters
from specbench.errors import RunError, UsageError
from specbench.harness import merge, row, trackers
from specbench.harness.execution import Execution
from specbench.harness.folder import (
    RunFolder,
    RunRecords,
    current_prompts,
    images_hash,
    new_folder,
    recorded_prompts,
    wants_baseline,
)
from specbench.harness.log import LOG, say, warn
from specbench.harness.scoring import (
    RecordedImages,
    basis,
    is_unmeasured,
    score_columns,
    scoring_context,
    scoring_device,
)
from specbench.harness.worker import Loader, PromptDecoder
from specbench.rows import indices, provenance, sample_size, store
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import as_read
from specbench.rows.journal import Journal
from specbench.storage import home


class Stopped(KeyboardInterrupt):
    """The user stopped a run. The message gives its progress and its folder."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


@dataclass(frozen=True)
class RunOutcome:
    """A finished run.

    row: `COLUMNS` -> value. cfg: the row's configuration, which may have more metrics and a baseline than the requested
    one. nothing_left: whether everything existed before. larger: n of the folder's row if that covers more images than
    requested: it stays, and `row` is written nowhere.
    """

    row: dict[str, Any]
    cfg: dict[str, Any]
    folder: RunFolder
    nothing_left: bool = False
    larger: int = 0

    def report(self) -> str:
        """The key values of the row as text, and the paths of the files."""
        stays = f" keeps the row over {self.larger} images; this one is only shown" if self.larger else ""
        files = [("row", f"{self.folder.row}{stays}"), ("contact sheet", str(self.folder.sheet))]
        lines = [row.report(self.row, self.cfg), *(f"  {name:<16} {text}" for name, text in files)]
        if self.nothing_left:
            n, each = self.row["n"], indices.images_per_prompt(self.cfg)
            what = f"the first {n} of {self.larger} are" if self.larger else f"{n * each} images and their row are"
            lines.insert(0, f"nothing left to do: {what} in {self.folder}")
        return "\n".join(lines)


def execute(cfg: Mapping[str, Any], out: str | Path | None = None, *, loader: Loader | None = None) -> dict[str, Any]:
    """Runs a configuration, or the rest of it, in its folder, and returns its row (`COLUMNS`).

    Args:
        cfg: checked, flat parameters, as `configuration.compose` gives them.
        out: the run's folder; None takes `cfg["out"]`, and if that is None, too, a new one under runs/.
        loader: makes the pipeline; None takes `specbench.harness.pipeline.Pipeline.load`.

    Raises UsageError for absent weights or prompts and a folder that holds something else, RunError if the disk or the
    memory did not suffice, and Stopped on Ctrl-C: the first one finishes the current image and writes a row over the
    finished images, the second one stops at once.
    """
    return Run(cfg, out, loader=loader).execute().row


class Run:
    """A checked configuration and its folder; arguments as of `execute`."""

    def __init__(self, cfg: Mapping[str, Any], out: str | Path | None = None, *, loader: Loader | None = None) -> None:
        self.requested = dict(cfg)
        self.cfg = self.requested  # later that of the row
        self.folder = RunFolder(home.expanded(out or cfg["out"] or new_folder()))
        self._scoring = str(cfg["device"]), metrics.ScoringContext.batch  # device and batch of the metrics' networks
        self._each = indices.images_per_prompt(cfg)
        self._loader = loader or _load_pipeline
        self._row: dict[str, Any] | None = None  # the folder's
        self._row_metrics: list[str] = []
        self._larger = 0  # n of that row, if larger than requested

    def execute(self) -> RunOutcome:
        """See `execute`."""
        is_new = not self.folder.path.exists()
        trackers.check(self.requested)
        with self.folder.opened():
            self._take_over()
            records = self.folder.open_records(self.cfg)
            try:
                outcome = self._execute(records)
                if not self._larger:
                    trackers.write(self.requested, outcome.row, self.folder)
                return outcome
            except KeyboardInterrupt:
                done = records.progress(self.cfg["n"])
                LOG.info("stopped by the user with %s", done)
                part = self._write_partial_row(records)
                text = f", a row over the first {part} in its row.csv" if part else ""
                raise Stopped(f"stopped with {done} done in {self.folder}{text}", self.folder.path) from None
            except (UsageError, RunError) as e:
                LOG.error("%s", e)
                if isinstance(e, UsageError) and is_new and not records.method.records:
                    shutil.rmtree(self.folder.path)  # a run that could not start leaves nothing
                raise
            except Exception as e:
                LOG.exception("cannot write" if self.folder.disk_fault(e) else "failed")
                raise

    def rescore(self, device: str | None = None, batch: int | None = None) -> RunOutcome:
        """Computes the metrics of a run with all its images, and builds its row again. Decodes nothing and needs only
        the weights of the metrics. UsageError if images are missing."""
        self._scoring = device or self._scoring[0], batch or self._scoring[1]
        with self.folder.opened():
            records = self.folder.open_records(self.cfg)
            n = self.cfg["n"]
            for journal in records.journals:
                if missing := journal.missing(n, self._each):
                    count = n * self._each
                    raise UsageError(
                        f"{self.folder} has {count - len(missing)} of the {count} images in {journal.path.name}: finish"
                        f" it first, with the `specbench run` that started it and out={self.folder}"
                    )
            items = current_prompts(self.cfg) or recorded_prompts(records.method, self.cfg)
            records.check_prompts(items)
            self._take_over()
            bases = self._bases()
            self._choose_metrics(records, bases)
            self._write_config()
            return self._score_and_write(records, items, bases)

    def requested_row(self, outcome: RunOutcome) -> dict[str, Any]:
        """The row of the requested configuration alone; the outcome's may have more metrics and a baseline."""
        if outcome.row["config_hash"] == provenance.config_hash(self.requested):
            return outcome.row
        names = [name for name in self.requested["metrics"] if name in outcome.cfg["metrics"]]
        filled = {column for name in names for column in parameters.metric_columns(name)}
        scores = {column: one for column, one in merge.scores(outcome.row).items() if column in filled}
        records, items = self.folder.open_records(self.requested), data.images_of(self.requested)
        return as_read(row.build_row(self.requested, self.folder, records, items, score_columns(scores)))

    def _execute(self, records: RunRecords) -> RunOutcome:
        # A finished run does not belong to weights that were trained later. (A custom loader has its own weights.)
        if self._loader is _load_pipeline and (here := _weights_here(self.cfg)) is not None:
            self.folder.check_same("weights", here)
        complete, bases = records.complete(self.cfg["n"]), self._bases()
        self._choose_metrics(records, bases)
        if complete and self.folder.sheet.exists() and self._row and self._is_finished(records, bases):
            records.check_prompts(current_prompts(self.cfg))
            self._write_config()
            LOG.info("nothing left to do")
            return RunOutcome(self._row, self.cfg, self.folder, nothing_left=True)
        items = data.images_of(self.cfg)
        records.check_prompts(items)
        self._write_config()
        if not complete:
            for name in self.cfg["metrics"]:
                if is_unmeasured(bases[name]):
                    say(f"{name} {bases[name]}")
                elif few := sample_size.too_few_for(name, self.cfg["n"] * self._each):
                    say(f"{name} stays empty: {few}, this run has {self.cfg['n'] * self._each:,}")
            Execution(self.cfg, self.folder, self._loader).decode_missing(records, items)
        return self._score_and_write(records, items, bases, nothing_left=complete)

    def _write_partial_row(self, records: RunRecords) -> int:
        """Writes the unscored row of a stopped run over the images before the first missing one, and returns their
        number. It is the row of a run with that n, and without a baseline if the baseline lacks images."""
        missing = records.method.missing(self.cfg["n"], self._each)
        n = indices.prompt_of(missing[0]) if missing else self.cfg["n"]
        if not n or (self._row and (self._row["n"] or 0) >= n):
            return 0
        cfg = self.cfg | {"n": n, "metrics": []}
        if records.vanilla is not None and records.vanilla.missing(n, self._each):
            cfg["baseline"], records = False, replace(records, vanilla=None)
        part = row.build_row(cfg, self.folder, records, data.images_of(cfg), {})
        if self._row and merge.changes(self._row, part | {"n": self._row["n"]}, {}):
            return 0  # the row of fewer images has more values
        part["note"] = "; ".join(filter(None, [f"stopped after {n} of {self.cfg['n']} images", part["note"]]))
        self.folder.write_row(part, records.method, {})
        return n

    def _score_and_write(
        self, records: RunRecords, items: Sequence[data.Item], bases: Mapping[str, str], nothing_left: bool = False
    ) -> RunOutcome:
        """Scores the images, draws the sheet and writes the row. If the folder's row covers more images, only returns
        the row."""
        if self._larger:
            scores = self._score(self.cfg["metrics"], records, items)
            shown = row.build_row(self.cfg, self.folder, records, items, score_columns(scores))
            return RunOutcome(as_read(shown), self.cfg, self.folder, nothing_left, self._larger)
        settled = self._settled(records, bases)
        old = merge.scores(self._row) if self._row and self._same_images(records) else {}
        scores = self._score([name for name in self.cfg["metrics"] if name not in settled], records, items)
        scores = self._return_columns(scores, old, records, items)
        for text in merge.unmeasured(old, scores):
            warn(text)
        new = row.build_row(self.cfg, self.folder, records, items, score_columns(merge.both(old, scores)))
        if self._row:
            reasons = {column: one.note for column, one in scores.items() if one.note}
            if not wants_baseline(self.cfg):
                speedups = [c for c in COLUMNS if c.startswith("speedup") or "baseline" in c]
                why = "some images of the baseline are missing, which baseline=true decodes"
                reasons |= dict.fromkeys([*speedups, "draft_cost"], why)
            for text in merge.changes(self._row, new, reasons):
                warn(text)
        row.draw_sheet(self.folder.sheet, self.cfg, new, records, items)
        self._write_config()
        tried = {*self.cfg["metrics"], *self.requested["metrics"]}
        self.folder.write_row(new, records.method, {name: text for name, text in bases.items() if name in tried})
        LOG.info("row written to %s", self.folder.row)
        outcome = RunOutcome(as_read(new), self.cfg, self.folder)  # the values that a later call would return
        keep([(self.folder.path, outcome.row)])
        return outcome

    # --- the existing row of the folder -------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Compares the configuration with the folder's, and reads the folder's row, of which this run must lose
        nothing."""
        theirs = self.folder.compare_config(self.cfg)
        self._row = self.folder.read_row() if theirs is not None else None
        if theirs is None or self._row is None:
            return
        if (self._row["n"] or 0) > self.cfg["n"]:
            self._larger = self._row["n"]
            return
        scored, known = self.folder.memory().get("metrics", ()), parameters.single_metrics()
        self._row_metrics = [m for m in theirs["metrics"] if m in known and m in scored]
        baseline = self.folder.baseline_records
        if self._row["baseline_run_id"] and not self.cfg["baseline"] and baseline.exists():
            # Nothing is decoded for it: the speed-ups stay if all images of the baseline exist.
            self.cfg = self.cfg | {"baseline": not Journal(baseline).missing(self.cfg["n"], self._each)}

    def _same_images(self, records: RunRecords) -> bool:
        """Whether the folder's row covers the images that exist now."""
        n = self.cfg["n"]
        if not self._row or self._row["n"] != n or records.method.missing(n, self._each):
            return False
        return bool(self.folder.memory().get("images") == images_hash(records.method, n, self._each))

    def _settled(self, records: RunRecords, bases: Mapping[str, str]) -> set[str]:
        """The metrics whose current value is in the folder's row already."""
        if not self._same_images(records):
            return set()
        scored = self.folder.memory().get("metrics", {})
        return {name for name, text in bases.items() if scored.get(name) == text}

    def _is_finished(self, records: RunRecords, bases: Mapping[str, str]) -> bool:
        """Whether the folder's row is this configuration's and its metrics would give the same values today."""
        if not self._row or not set(self.cfg["metrics"]) <= self._settled(records, bases):
            return False
        return self._same_images(records) and self._row["config_hash"] == provenance.config_hash(self.cfg)

    def _write_config(self) -> None:
        if not self._larger:  # else the folder's configuration is that of its row
            self.folder.write_config(self.cfg)

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _bases(self) -> dict[str, str]:
        """Metric -> its `scoring.basis`, of the requested metrics and those of the folder's row."""
        context = scoring_context(self.cfg)
        return {name: basis(name, context) for name in dict.fromkeys([*self._row_metrics, *self.requested["metrics"]])}

    def _choose_metrics(self, records: RunRecords, bases: Mapping[str, str]) -> None:
        """Chooses the metrics of the row: its existing ones and the requested ones. A requested metric takes a column
        that both fill, unless it was tried on these images and had no value."""
        if self._larger:
            return
        settled = self._settled(records, bases)
        wanted = []
        for name in self.requested["metrics"]:
            rivals = merge.rivals(name, self._row_metrics)
            if name in settled and name not in self._row_metrics and rivals:
                say(f"{name} could not be measured of these images: the row keeps {', '.join(rivals)}")
            else:
                wanted.append(name)
        self.cfg = self.cfg | {"metrics": merge.names(self._row_metrics, wanted)}

    def _score(self, names: Sequence[str], records: RunRecords, items: Sequence[data.Item]) -> dict[str, metrics.Score]:
        """Column -> score of these metrics."""
        if not names:
            return {}
        say(f"scoring: {', '.join(names)}")
        device, batch = self._scoring
        context = scoring_context(self.cfg, scoring_device(device), batch)
        images = RecordedImages(records.method, len(items) // self._each, self._each)
        return metrics.score(names, images, items, context, metrics.Outputs(self.folder.path))

    def _return_columns(
        self,
        scores: Mapping[str, metrics.Score],
        old: Mapping[str, metrics.Score],
        records: RunRecords,
        items: Sequence[data.Item],
    ) -> dict[str, metrics.Score]:
        """Returns columns to the metrics that had them if the new metric has no value."""
        found = dict(scores)
        for name in self.cfg["metrics"]:
            columns = [column for column in parameters.metric_columns(name) if column in scores]
            others = [m for m in merge.rivals(name, self._row_metrics) if m not in self.cfg["metrics"]]
            if not others or not columns or any(scores[column].value is not None for column in columns):
                continue
            warn(f"{name} could not be measured ({scores[columns[0]].note}): the row keeps {', '.join(others)}")
            rest = [m for m in self.cfg["metrics"] if m != name]
            earlier = [m for m in self._row_metrics if m in (*rest, *others)]
            self.cfg = self.cfg | {"metrics": [*earlier, *(m for m in rest if m not in self._row_metrics)]}
            for column in columns:
                del found[column]
            if not old:  # the old scores belong to other images
                found |= self._score(others, records, items)
        return found


def keep(rows: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    """Adds finished runs' rows, each with its folder, to the store of results. A run never fails for it."""
    if (path := store.default()) is None:
        return
    try:
        store.add(path, [(folder.absolute(), row) for folder, row in rows])
    except (OSError, sqlite3.Error, ValueError) as e:
        warn(f"the row is not added to {path} ({e}); specbench collect finds it in its folder")


def _load_pipeline(cfg: Mapping[str, Any]) -> PromptDecoder:
    from specbench.harness.pipeline import Pipeline

    check(cfg)
    return Pipeline.load(cfg)


def _weights_here(cfg: Mapping[str, Any]) -> str | None:
    """The label in a row of the weights that exist now; None if they are absent, or a server has them. Loads
    nothing."""
    from specbench.config import registry

    if parameters.is_served(cfg):
        return None
    try:
        return registry.weights_label(cfg)
    except OSError:
        return None


def check(cfg: Mapping[str, Any]) -> None:
    """Raises UsageError for faults that show before a model is loaded: absent weights, a bad tree, an absent device."""
    trackers.check(cfg)
    if parameters.is_served(cfg):
        return
    from specbench.config import registry
    from specbench.harness import method
    from specbench.harness.pipeline import engine_of, resolve_device

    method.check(cfg)
    engine_of(cfg, resolve_device(cfg["device"]))
    registry.check_weights(cfg)
