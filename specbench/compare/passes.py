"""The input of a comparison: the records of a run's pass over its prompts, the run's metadata, and its metrics: the
value of a metric over the images, and how each image moves it, computed from the cached scorer outputs of the run. The
files are not trusted: every mistake in them is a UsageError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench import data
from specbench.config import indices, parameters, registry
from specbench.config.parameter import Parameters
from specbench.config.run_config import PromptSelection
from specbench.errors import UsageError, plain
from specbench.rows import remark_text, shown, summary
from specbench.rows.journal import TIMINGS, Record, TimingJournal, read_records
from specbench.rows.provenance import MAY_CHANGE, DecodingProcess, RunMetadata
from specbench.storage import home
from specbench.storage.reading import read_yaml

if TYPE_CHECKING:
    from specbench.metrics.base import Metric


@dataclass(frozen=True)
class ScoredPass:
    """One pass of a run over its prompts: the method's, or vanilla's. argument: the name that the user gave."""

    argument: str
    folder: Path
    baseline: bool
    cfg: Parameters
    run_id: str
    sessions: Mapping[str, DecodingProcess]
    records: Mapping[int, Record] = field(repr=False)
    again: Sequence[Record] = field(default=(), repr=False)  # images of both passes that were timed again

    @property
    def method(self) -> str:
        return "vanilla" if self.baseline else plain(self.cfg["method"])

    @property
    def drafter(self) -> str:
        return str(self.cfg["drafter"])

    @property
    def data(self) -> str:
        return str(self.cfg.get("data") or "")

    @property
    def metrics_dir(self) -> str | None:
        return self.cfg.get("metrics_dir") or None

    @property
    def reference(self) -> str | None:
        return self.cfg.get("reference") or None

    @property
    def path(self) -> str:
        """The folder, followed by /baseline for the vanilla images."""
        return plain(self.folder / "baseline" if self.baseline else self.folder)


def read(argument: str) -> ScoredPass:
    """The pass that an argument names: a run's folder, DIR/baseline, or one of their .jsonl files.

    Raises UsageError if there is no pass, or if it is damaged.
    """
    path = home.expanded(argument)
    candidates = {path / "records.jsonl": True, path.parent / "baseline.jsonl": path.name == "baseline"}
    candidates |= {path: path.name in ("records.jsonl", "baseline.jsonl")}
    journal = next((p for p, meant in candidates.items() if meant and p.is_file()), None)
    if journal is None:
        raise UsageError(_no_run(path))
    cfg, metadata = _config(journal.with_name("config.yaml")), RunMetadata.read(journal.with_name("run.json"))
    baseline = journal.name == "baseline.jsonl"
    again = TimingJournal(journal.with_name(TIMINGS)).lines
    run_id, sessions, records = plain(metadata.run_id), metadata.sessions, _records(journal)
    return ScoredPass(argument, journal.parent, baseline, cfg, run_id, sessions, records, again)


def _no_run(path: Path) -> str:
    """Why a folder contains no pass, and what to do."""
    if path.name == "baseline" and (path.parent / "records.jsonl").is_file():
        return f"the run in {path.parent} decoded no baseline; run it again with baseline=true"
    if not path.exists():
        return f"there is no {path}; name the folder of a run"
    inside = sorted(path.glob("*/records.jsonl"))
    if inside:
        return f"{path} is not a run, but contains {len(inside)} of them; name one, such as {inside[0].parent}"
    return f"{path} has no records of a run (records.jsonl); name the folder of a run that decoded something"


def _config(path: Path) -> dict[str, Any]:
    """The configuration of a run; its method, drafter and rule are strings."""
    cfg = read_yaml(path, "compare whole folders of runs")
    if all(isinstance(cfg.get(name), str) for name in ("method", "drafter", "rule")):
        return cfg
    raise UsageError(f"{path} is not the configuration of a run; compare folders as specbench run wrote them")


def unsteady(scored_pass: ScoredPass) -> str:
    """Why the timing of the run of a pass is not valid; "" if it is valid, or if that is not known."""
    names = ("records", "baseline")
    journals = [path for name in names if (path := scored_pass.folder / f"{name}.jsonl").is_file()]
    if len(journals) < 2:
        return ""
    method, vanilla = map(_records, journals)
    shared = sorted(method.keys() & vanilla.keys())
    columns = summary.versus([method[i] for i in shared], [vanilla[i] for i in shared], scored_pass.again)
    values = shown.unsteady(columns)
    return remark_text.unsteady(values) if values else ""


def _records(path: Path) -> dict[int, Record]:
    """The records of a pass by index. Raises UsageError for damaged records, and for two records with one index."""
    try:
        read = read_records(path)
    except OSError as e:
        raise UsageError(f"cannot read {path} ({e.strerror}); name another folder") from None
    by_index: dict[int, Record] = {}
    for record in read:
        if by_index.setdefault(record.index, record) != record:
            raise UsageError(f"{path} holds two records of index {record.index}; remove one of the lines")
    return by_index


#: The conditions of a timing besides the method: parameters of a run, and facts of its processes.
_OF_TIMINGS = ("device", "device_name", "dtype", "engine", "batch", "warmup", "torch", "driver", "threads")
_FACTS = ("weights", "commit", "device", "device_name", "torch", "driver", "threads")
_LONGEST = 40  # maximum characters of a value


def names(a: ScoredPass, b: ScoredPass) -> tuple[str, str]:
    """The labels of two passes: their methods and, if these are equal, the parameters in which they differ. A parameter
    that is off has no place in a label."""
    labels = [a.method, b.method]
    if labels[0] == labels[1] and not (a.baseline or b.baseline):
        different = [k for k in sorted(parameters.method_parameters()) if a.cfg.get(k) != b.cfg.get(k)]
        for i, scored_pass in enumerate((a, b)):
            given = {k: scored_pass.cfg[k] for k in different if scored_pass.cfg.get(k) is not None}
            values = (plain(f"{k}={value}")[:_LONGEST] for k, value in given.items())
            labels[i] = " ".join([labels[i], *values])
    if labels[0] == labels[1]:
        paths = ["/".join(Path(p.path).parts[-2 - p.baseline :]) for p in (a, b)]
        labels = [f"{name} ({path})" for name, path in zip(labels, paths if paths[0] != paths[1] else "AB")]
    return labels[0], labels[1]


def remarks_on_conditions(a: ScoredPass, b: ScoredPass, pairs: Sequence[tuple[Record, Record]]) -> list[str]:
    """A sentence on the differences besides the method over these pairs, and their consequence; [] without
    differences."""
    facts_a, facts_b = (_facts(side, [pair[i] for pair in pairs]) for i, side in enumerate((a, b)))
    unlike = [name for name in facts_a if name in facts_b and facts_a[name] != facts_b[name]]
    if not unlike:
        return []
    text = f"A and B differ in more than the method: {_listed(unlike, facts_a, facts_b)}."
    if any(name in _OF_TIMINGS for name in unlike):
        text += " Their timings do not compare the methods alone."
    if "seed" in unlike:
        text += " Pairs share the prompt, not the random numbers."
    return [text]


def _listed(names: Sequence[str], a: Mapping[str, str], b: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {a[name][:_LONGEST]} / {b[name][:_LONGEST]}" for name in names)


def _facts(scored_pass: ScoredPass, records: Sequence[Record]) -> dict[str, str]:
    """The conditions of the images and timings of a pass besides its method: name -> value, printable."""
    ignored = {*parameters.method_parameters(), *MAY_CHANGE, "method", "weights", "prompts", "seed"}
    facts: dict[str, Any] = {name: value for name, value in scored_pass.cfg.items() if name not in ignored}
    used = sorted({r.session for r in records})
    sessions = [scored_pass.sessions[name] for name in used if name in scored_pass.sessions]
    for name in _FACTS:
        values = {str(value) for process in sessions if (value := getattr(process, name)) not in (None, "")}
        if name == "weights":
            values = {registry.target_weights(value) for value in values}
        if values:
            facts[name] = " and ".join(sorted(value[:8] if name == "commit" else value for value in values))
    facts["seed"] = " and ".join(map(str, sorted({r.seed for r in records})))
    return {name: "off" if value is None else plain(value) for name, value in facts.items()}


@dataclass(frozen=True)
class MetricOfRun:
    """scorer: must be the same in runs that are compared: the scorer's cache key or, for a metric of all images
    together, its fingerprint. value: over all images. influences (P,): how each of P prompts moves it, of mean zero, in
    the order of their index."""

    scorer: str
    value: float
    influences: np.ndarray


def of_column(run: ScoredPass, column: str) -> MetricOfRun:
    """The metric that fills a column of the row, over all images of a run. UsageError if it was not measured."""
    from specbench import metrics

    outputs = metrics.Outputs(run.folder)
    known = [name for name in outputs.scorers if name in parameters.single_metrics()]
    names = [name for name in known if parameters.metric_columns(name)[0] == column]
    if not names:
        raise UsageError(f"{plain(run.argument)} did not measure {plain(column)}: compare runs that did")
    scorer, scored_by = outputs.scorers[names[0]], metric(run, names[0])
    records = [record for _, record in sorted(run.records.items())]
    prompts = [indices.prompt_of(record.index) for record in records]
    try:
        rows = outputs.cache(scorer).rows(keys(scored_by, records))
        per_image = scored_by.per_image(rows)
        if per_image is not None:
            value = float(per_image.mean())
            return MetricOfRun(scorer, value, of_prompts(finite(per_image - value), prompts))
        if scored_by.cache_key != scorer:
            raise UsageError(f"it was scored by {plain(scorer)}, whose weights are not here")
        value, influences = value_and_influences(scored_by, rows, items(run, records))
        return MetricOfRun(scored_by.fingerprint(), value, of_prompts(finite(influences), prompts))
    except (UsageError, metrics.Unavailable) as e:
        raise UsageError(f"{plain(run.argument)}: {names[0]}: {e}") from None
    except (ArithmeticError, LookupError, RuntimeError, ValueError):
        raise UsageError(
            f"not every image of {plain(run.argument)} has an output of {plain(scorer)}: score the run with specbench"
            " evaluate"
        ) from None


def metric(run: ScoredPass, name: str) -> Metric:
    """A metric in the scoring context of a run's configuration."""
    from specbench import metrics

    return metrics.metric(name, metrics.scoring_context(run))


def keys(metric: Metric, records: Sequence[Record]) -> list[str]:
    """The keys of these images among the cached outputs of a metric's scorer."""
    from specbench.metrics.outputs import image_key

    return [image_key(r.sha256, r.prompt if metric.reads_prompt else None) for r in records]


def value_and_influences(metric: Metric, outputs: np.ndarray, prompts: Sequence[data.Item]) -> tuple[float, np.ndarray]:
    """The value of a metric of all images together, and the influence of each image (N,). UsageError if it has none."""
    score, influences = metric.score(outputs, prompts)[0], metric.influences(outputs, prompts)
    if score.value is None or influences is None:
        few = f"{len(prompts)} pairs are too few for an interval of its difference"
        why = few if score.value is not None else remark_text.joined(score.remarks)
        raise UsageError(f"a statistic of all images together, and {why}")
    return score.value, influences


def items(run: ScoredPass, records: Sequence[Record]) -> list[data.Item]:
    """The prompts of these records, with their labels if code generates the data set."""
    if not registry.is_drawn(run.data):
        return [data.Item(r.index, r.prompt, None, r.id) for r in records]
    n = max(indices.prompt_of(r.index) for r in records) + 1
    made = data.load(PromptSelection(run.data, n, run.cfg["seed"], run.cfg))
    result = [replace(made[indices.prompt_of(r.index)], index=r.index) for r in records]
    if any(item.prompt != r.prompt for item, r in zip(result, records)):
        raise UsageError(f"its prompts are not the present ones of data={run.data}")
    return result


def of_prompts(influences: np.ndarray, prompts: Sequence[int]) -> np.ndarray:
    """How each prompt (G,) moves a statistic, from how each image (N,) does: 1 / G of a prompt's influence is the sum
    of 1 / N of its images' influences."""
    _, members = np.unique(prompts, return_inverse=True)
    sums = np.bincount(members, influences)
    return np.asarray(sums * (len(sums) / len(influences)))


def finite(values: np.ndarray) -> np.ndarray:
    """Returns the values. ValueError if one is not finite."""
    if not np.isfinite(values).all():
        raise ValueError("not finite")
    return values
