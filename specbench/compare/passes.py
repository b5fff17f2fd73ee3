"""The input of a comparison: the records of a run's pass over its prompts, the run's metadata, and what its metrics
say: a metric's value over the images, and how each of them moves it, from the scorer outputs that the run keeps. The
files are not trusted: every fault in them is a UsageError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench import data
from specbench.config import indices, parameters, registry
from specbench.errors import UsageError, plain
from specbench.rows import shown, summary
from specbench.rows.journal import TIMINGS, Record, TimingJournal, read_records
from specbench.rows.provenance import MAY_CHANGE, RunMetadata
from specbench.storage import home
from specbench.storage.reading import read_yaml

if TYPE_CHECKING:
    from specbench.metrics.base import Metric


@dataclass(frozen=True)
class ScoredPass:
    """One pass of a run over its prompts: the method's, or vanilla's next to it. `argument`: the user's."""

    argument: str
    folder: Path
    baseline: bool
    cfg: Mapping[str, Any]
    run_id: str
    sessions: Mapping[str, Mapping[str, Any]]
    records: Mapping[int, Record] = field(repr=False)
    again: Sequence[Record] = field(default=(), repr=False)  # images of both passes that were timed again

    @property
    def method(self) -> str:
        return "vanilla" if self.baseline else plain(self.cfg["method"])

    @property
    def path(self) -> str:
        """The folder, and /baseline behind it for the vanilla images."""
        return plain(self.folder / "baseline" if self.baseline else self.folder)


def read(argument: str) -> ScoredPass:
    """The pass that an argument names: a run's folder, DIR/baseline, or one of their .jsonl files.

    Raises UsageError where there is none, or where it is damaged.
    """
    path = home.expanded(argument)
    candidates = {path / "records.jsonl": True, path.parent / "baseline.jsonl": path.name == "baseline"}
    candidates |= {path: path.name in ("records.jsonl", "baseline.jsonl")}
    journal = next((p for p, meant in candidates.items() if meant and p.is_file()), None)
    if journal is None:
        raise UsageError(_no_run(path))
    cfg, memory = _config(journal.with_name("config.yaml")), RunMetadata.read(journal.with_name("run.json"))
    baseline = journal.name == "baseline.jsonl"
    again = TimingJournal(journal.with_name(TIMINGS)).lines
    run_id, sessions, records = plain(memory.run_id), memory.sessions, _records(journal)
    return ScoredPass(argument, journal.parent, baseline, cfg, run_id, sessions, records, again)


def _no_run(path: Path) -> str:
    """Why there is no pass in a folder, and what to do."""
    if path.name == "baseline" and (path.parent / "records.jsonl").is_file():
        return f"the run in {path.parent} decoded no baseline; run it again with baseline=true"
    if not path.exists():
        return f"there is no {path}; name the folder of a run"
    inside = sorted(path.glob("*/records.jsonl"))
    if inside:
        return f"{path} is not a run but holds {len(inside)} of them; name one, such as {inside[0].parent}"
    return f"{path} has no records of a run (records.jsonl); name the folder of a run that decoded something"


def _config(path: Path) -> dict[str, Any]:
    """The configuration of a run; its method, drafter and rule are strings."""
    found = read_yaml(path, "compare whole folders of runs")
    if all(isinstance(found.get(name), str) for name in ("method", "drafter", "rule")):
        return {"verification": "token"} | found  # older ones lack it
    raise UsageError(f"{path} is not the configuration of a run; compare folders as specbench run wrote them")


def unsteady(one: ScoredPass) -> str:
    """Why the timing of the run of a pass does not hold; empty where it does, or cannot be told."""
    both = [journal for name in ("records", "baseline") if (journal := one.folder / f"{name}.jsonl").is_file()]
    if len(both) < 2:
        return ""
    mine, vanilla = map(_records, both)
    shared = sorted(mine.keys() & vanilla.keys())
    return shown.unsteady(summary.versus([mine[i] for i in shared], [vanilla[i] for i in shared], one.again))


def _records(path: Path) -> dict[int, Record]:
    """The records of a pass by index. Raises UsageError for one that is damaged, and for two of one index."""
    try:
        read = read_records(path)
    except OSError as e:
        raise UsageError(f"cannot read {path} ({e.strerror}); name another folder") from None
    found: dict[int, Record] = {}
    for record in read:
        if found.setdefault(record.index, record) != record:
            raise UsageError(f"{path} holds two records of index {record.index}; remove one of the lines")
    return found


#: What a timing depends on besides the method: parameters of a run, and facts of its processes.
_OF_TIMINGS = ("device", "device_name", "dtype", "engine", "batch", "warmup", "torch", "driver", "threads")
_FACTS = ("weights", "commit", "device", "device_name", "torch", "driver", "threads")
_LONGEST = 40  # characters of a value


def names(a: ScoredPass, b: ScoredPass) -> tuple[str, str]:
    """The labels of two passes: their methods and, where these are equal, what else differs."""
    labels = [a.method, b.method]
    if labels[0] == labels[1] and not (a.baseline or b.baseline):
        different = [k for k in sorted(parameters.method_parameters()) if a.cfg.get(k) != b.cfg.get(k)]
        for i, one in enumerate((a, b)):
            labels[i] = " ".join([labels[i], *(plain(f"{k}={one.cfg.get(k)}")[:_LONGEST] for k in different)])
    if labels[0] == labels[1]:
        paths = ["/".join(Path(one.path).parts[-2 - one.baseline :]) for one in (a, b)]
        labels = [f"{name} ({path})" for name, path in zip(labels, paths if paths[0] != paths[1] else "AB")]
    return labels[0], labels[1]


def differences(a: ScoredPass, b: ScoredPass, pairs: Sequence[tuple[Record, Record]]) -> list[str]:
    """A sentence on what differs besides the method over these pairs, and what follows; none where nothing differs."""
    mine, theirs = (_facts(one, [two[side] for two in pairs]) for side, one in enumerate((a, b)))
    unlike = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    if not unlike:
        return []
    text = f"A and B differ in more than the method: {_each(unlike, mine, theirs)}."
    if any(name in _OF_TIMINGS for name in unlike):
        text += " Their timings do not compare the methods alone."
    if "seed" in unlike:
        text += " Pairs share the prompt, not the random numbers."
    return [text]


def _each(names: Sequence[str], mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {mine[name][:_LONGEST]} / {theirs[name][:_LONGEST]}" for name in names)


def _facts(one: ScoredPass, mine: Sequence[Record]) -> dict[str, str]:
    """What determines the images and timings of a pass besides its method: name -> value, printable."""
    other = {*parameters.method_parameters(), *MAY_CHANGE, "method", "weights", "prompts", "seed"}
    facts: dict[str, Any] = {name: value for name, value in one.cfg.items() if name not in other}
    sessions = [one.sessions[name] for name in sorted({r.session for r in mine}) if name in one.sessions]
    for name in _FACTS:
        values = {str(session[name]) for session in sessions if session.get(name) not in (None, "")}
        if name == "weights":  # the target's, see registry.weights_label
            values = {value.partition("+")[0] for value in values}
        if values:
            facts[name] = " and ".join(sorted(value[:8] if name == "commit" else value for value in values))
    facts["seed"] = " and ".join(map(str, sorted({r.seed for r in mine})))
    return {name: plain(value) for name, value in facts.items()}


@dataclass(frozen=True)
class MetricOfRun:
    """scorer: what must be the same in runs that are compared: the scorer's cache key or, of a metric of all images
    together, its basis. value: over all images. influences (P,): how each of P prompts moves it, of mean zero, in the
    order of their index."""

    scorer: str
    value: float
    influences: np.ndarray


def of_column(one: ScoredPass, column: str) -> MetricOfRun:
    """The metric that fills a column of the row, over all images of a run. UsageError where it is not measured."""
    from specbench import metrics

    outputs = metrics.Outputs(one.folder)
    known = [name for name in outputs.scorers if name in parameters.single_metrics()]
    found = [name for name in known if parameters.metric_columns(name)[0] == column]
    if not found:
        raise UsageError(f"{plain(one.argument)} did not measure {plain(column)}: compare runs that did")
    scorer, mine = outputs.scorers[found[0]], metric(one, found[0])
    records = [record for _, record in sorted(one.records.items())]
    prompts = [indices.prompt_of(record.index) for record in records]
    try:
        rows = outputs.cache(scorer).rows(keys(mine, records))
        per_image = mine.per_image(rows)
        if per_image is not None:
            value = float(per_image.mean())
            return MetricOfRun(scorer, value, of_prompts(finite(per_image - value), prompts))
        if mine.cache_key != scorer:
            raise UsageError(f"it was scored by {plain(scorer)}, whose weights are not here")
        value, influences = value_and_influences(mine, rows, items(one, records))
        return MetricOfRun(mine.basis(), value, of_prompts(finite(influences), prompts))
    except (UsageError, metrics.Unavailable) as e:
        raise UsageError(f"{plain(one.argument)}: {found[0]}: {e}") from None
    except (ArithmeticError, LookupError, RuntimeError, ValueError):
        raise UsageError(
            f"not every image of {plain(one.argument)} has an output of {plain(scorer)}: score the run with specbench"
            " evaluate"
        ) from None


def metric(one: ScoredPass, name: str) -> Metric:
    """A metric in the scoring context of a run's configuration."""
    from specbench import metrics

    settings = {key: str(one.cfg.get(key) or "") for key in ("metrics_dir", "reference", "data")}
    return metrics.metric(name, metrics.scoring_context(settings))


def keys(one: Metric, records: Sequence[Record]) -> list[str]:
    """The keys of these images among the cached outputs of a metric's scorer."""
    from specbench.metrics.outputs import image_key

    return [image_key(r.sha256, r.prompt if one.reads_prompt else None) for r in records]


def value_and_influences(one: Metric, outputs: np.ndarray, prompts: Sequence[data.Item]) -> tuple[float, np.ndarray]:
    """The value of a metric of all images together, and the influence of each (N,). UsageError where it has none."""
    score, influences = one.score(outputs, prompts)[0], one.influences(outputs, prompts)
    if score.value is None or influences is None:
        few = f"{len(prompts)} pairs are too few for an interval of its difference"
        raise UsageError(f"a statistic of all images together, and {score.note if score.value is None else few}")
    return score.value, influences


def items(one: ScoredPass, mine: Sequence[Record]) -> list[data.Item]:
    """The prompts of these records; with their labels, where the code generates the data set."""
    if not registry.is_drawn(str(one.cfg.get("data"))):
        return [data.Item(r.index, r.prompt, None, r.id) for r in mine]
    made = data.load({**one.cfg, "n": max(indices.prompt_of(r.index) for r in mine) + 1})
    found = [replace(made[indices.prompt_of(r.index)], index=r.index) for r in mine]
    if any(item.prompt != r.prompt for item, r in zip(found, mine)):
        raise UsageError(f"its prompts are not those of data={one.cfg['data']} now")
    return found


def of_prompts(influences: np.ndarray, prompts: Sequence[int]) -> np.ndarray:
    """How each prompt (G,) moves a statistic, from how each of its images (N,) does: 1 / G of the one is the sum of 1 /
    N of the others."""
    _, of = np.unique(prompts, return_inverse=True)
    sums = np.bincount(of, influences)
    return np.asarray(sums * (len(sums) / len(influences)))


def finite(values: np.ndarray) -> np.ndarray:
    """ValueError for values that are not."""
    if not np.isfinite(values).all():
        raise ValueError("not finite")
    return values
