"""What runs must fetch before they start: files with their sizes, licences, and the commands in order. It contacts no
server."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from specbench import metrics
from specbench.config import registry
from specbench.config.missing_weights import fetching
from specbench.config.run_config import RunConfig
from specbench.harness.planned import PlannedRun
from specbench.metrics.base import Unavailable
from specbench.metrics.compared import ComparedMetric
from specbench.storage import downloads, home, sources
from specbench.storage.files import format_size
from specbench.storage.sources import Part


@dataclass(frozen=True)
class Fetch:
    """The missing files of one folder, and the command that fetches them. sizes: bytes by name, 0 if unknown."""

    what: str
    sizes: Mapping[str, float]
    licence: str
    command: str


def missing(runs: Sequence[PlannedRun]) -> list[Fetch]:
    """The files that runs still need, each folder once."""
    fetches: dict[str, Fetch] = {}
    for run in runs:
        for fetch in (*_of_model(run.config), *_of_data(run.config), *_of_metrics(run.config)):
            fetches.setdefault(fetch.what, fetch)
    return list(fetches.values())


def total(fetches: Sequence[Fetch]) -> tuple[float, str]:
    """The bytes of files, as far as they are known, and as text."""
    sizes = [size for fetch in fetches for size in fetch.sizes.values()]
    unknown = f" and {sizes.count(0)} files of unknown size" if 0 in sizes else ""
    return sum(sizes), f"{format_size(sum(sizes))}{unknown}"


def report(runs: Sequence[PlannedRun], command: str) -> tuple[float, list[str]]:
    """Bytes to fetch, as far as known, and the text."""
    fetches, lines = missing(runs), []
    for fetch in fetches:
        lines.append(f"download  {fetch.what} ({sources.restricted(fetch.licence)})")
        lines += [f"download    {sources.sized(size):>12}  {name}" for name, size in fetch.sizes.items()]
    size, text = total(fetches)
    lines.append(f"download  {f'{text} in total' if fetches else 'nothing'}")
    steps = dict.fromkeys([*_commands(fetches), *_references(runs), command])
    return size, [*lines, *(f"{'then' if i else 'first':9} {text}" for i, text in enumerate(steps))]


def _commands(fetches: Sequence[Fetch]) -> list[str]:
    """One command fetches a model's target and a drafter; one command fetches all metrics."""
    commands = dict.fromkeys(each.command for each in fetches)
    scores = [text.partition(" metrics=")[2] for text in commands if " metrics=" in text]
    others = [text for text in commands if " metrics=" not in text]
    longest = [text for text in others if not any(other.startswith(f"{text} ") for other in others)]
    order = (" model=", " data=", "specbench train ")  # a drafter is trained on the target and on prompts
    longest.sort(key=lambda text: [i for i, mark in enumerate(order) if mark in text][-1:])
    return longest + ([f"specbench fetch metrics={','.join(scores)}"] if scores else [])


def _part(what: str, part: Part, command: str) -> Fetch:
    return Fetch(f"{what} from {part.repository}", part.known_sizes, part.licence, command)


def _of_model(cfg: RunConfig) -> Iterator[Fetch]:
    other = registry.official_target(cfg.drafter_weights or "")
    if other and not (home.model_folder(other) / "target").is_dir():
        drafting = registry.model_sources()[other].parts["target"]
        yield _part(f"target/ of {other}, which drafts", drafting, fetching(other, None, "official", []))
    folder, source = registry.weights_folder(cfg), registry.model_sources().get(cfg.model)
    if folder is None or source is None:
        return
    size = str(cfg.size)
    for name in registry.absent_folders(cfg):
        part = source.sizes[size] if name == "target" and size in source.sizes else sources.part_of(source, name)
        what = f"{name}/ of {cfg.model}"
        if part is None:
            yield Fetch(what, {}, "not published", registry.training(cfg.model, name) or f"put {name}/ there")
        else:
            drafters = [] if name in source.parts else [cfg.drafter]
            chosen = size if size in source.sizes else None
            yield _part(what, part, fetching(cfg.model, chosen, cfg.weights, drafters))


def _of_data(cfg: RunConfig) -> Iterator[Fetch]:
    data = registry.data_sources().get(cfg.data)
    if data is None:
        return
    folder = home.expanded(cfg.get("data_dir") or home.data_folder(cfg.data))
    record = downloads.FetchRecord(folder)
    if todo := [file for file in data.files if not downloads.is_unpacked(record, file, folder)]:
        more = f" data_dir={_quoted(folder)}" if cfg.get("data_dir") else ""
        sizes = {file.name: float(file.size) for file in todo}
        yield Fetch(f"data {cfg.data}", sizes, data.licence, f"specbench fetch data={cfg.data}{more}")


def _of_metrics(cfg: RunConfig) -> Iterator[Fetch]:
    context = metrics.scoring_context(cfg)
    for name in cfg.metrics:
        if metrics.missing(name, context):
            for folder in registry.evaluator_folders(name):
                if not (context.weights / folder).is_dir():
                    part = registry.evaluators()[folder]
                    yield _part(f"{folder}/ of metrics", part, f"specbench fetch metrics={name}")


def unmeasured(configs: Iterable[RunConfig]) -> list[str]:
    """The metrics that would stay empty, and why, apart from weights and statistics that are not here."""
    reasons: dict[str, None] = {}
    for cfg in configs:
        context = metrics.scoring_context(cfg)
        for name in cfg.metrics:
            if all((context.weights / folder).is_dir() for folder in registry.evaluator_folders(name)):
                reasons |= {f"{name}: {text}": None for text in [metrics.missing(name, context)] if text}
    return list(reasons)


def _references(runs: Sequence[PlannedRun]) -> list[str]:
    """The commands that compute missing statistics of real images, one per data set and network."""
    needed: dict[str, dict[tuple[str, Any], str]] = {}  # by the features, which several metrics share
    for cfg in (run.config for run in runs if run.config.reference is None):
        for name in cfg.metrics:
            if issubclass(registry.find("metrics", name), ComparedMetric) and _needs_reference(name, cfg):
                metric: Any = metrics.metric(name, metrics.scoring_context(cfg))
                features = metric.of_real, metric.options.get("crop")
                needed.setdefault(cfg.data, {}).setdefault(features, name)
    makes = "specbench reference data={} images={} metrics={}".format
    return [makes(data, _images(data), ",".join(names.values())) for data, names in needed.items()]


def _needs_reference(name: str, cfg: RunConfig) -> bool:
    try:
        metrics.metric(name, metrics.scoring_context(cfg)).reference  # type: ignore[attr-defined]  # noqa: B018 (raises)
    except Unavailable:
        return True
    return False


def _images(data: str) -> str:
    """The folder of a data set's images, where `specbench fetch` puts it."""
    source = registry.data_sources().get(data)
    patterns = [pattern for file in source.files for pattern in file.unpack] if source else []
    folders = [str(PurePosixPath(pattern).parent) for pattern in patterns if pattern.endswith((".jpg", ".png"))]
    return _quoted(home.data_folder(data) / folders[0]) if folders else "DIR"


def _quoted(path: Path) -> str:
    """For a shell; a path below the user's home folder starts with ~, which the commands expand."""
    user_home = Path.home()
    if path.is_relative_to(user_home):
        return f"~/{shlex.quote(path.relative_to(user_home).as_posix())}"
    return shlex.quote(str(path))
