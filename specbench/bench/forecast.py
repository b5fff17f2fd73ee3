"""What runs will do before they do it: images to decode and those that are there, time, disk, memory, downloads.

Time is known from rows of this machine in the store of results alone; what is not known is said to be unknown. Nothing
is loaded, fetched or written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.harness.planned import PlannedRun
from specbench.storage.files import format_size

_MOST = 40  # runs that are listed one by one
_RECENT = 200  # records from which a speed is computed
#: Parameters that do not change how fast an image is decoded.
_FREE = (
    *("seed", "n", "images_per_prompt", "split", "data", "caption", "prompts"),
    *("timing", "warmup", "protocol", "variant", "emitted_draws"),
)


@dataclass(frozen=True)
class Rate:
    """Seconds per image, and where from."""

    seconds: float
    exact: bool  # of the same parameters, not only of the same method


@dataclass(frozen=True)
class Forecast:
    """What a run will do. images, there: of both passes; seconds: for what is left, None: unknown; fault: why it cannot
    start yet."""

    run: PlannedRun
    images: int
    there: int
    seconds: float | None
    exact: bool
    fault: str

    @property
    def left(self) -> int:
        return self.images - self.there


def report(title: str, runs: Sequence[PlannedRun]) -> str:
    """The forecast of runs as text."""
    known = _Known()
    found = [_forecast(run, known) for run in runs]
    images, there = sum(one.images for one in found), sum(one.there for one in found)
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}"
    lines = [f"dry run of {title}: {count}, nothing is decoded"]
    lines += [f"  {_line(one)}" for one in found[:_MOST]]
    if len(found) > _MOST:
        lines.append(f"  ... and {len(found) - _MOST} more runs")
    lines.append(f"decode    {images - there} images, {there} of {images} are there")
    lines.append(f"time      {_time(found)}")
    lines += [f"disk      {_disk(found, known)}"]
    lines += [f"memory    {text}" for text in _memory(found)]
    lines += [f"download  {text}" for text in _downloads(runs) or ["nothing"]]
    faults = dict.fromkeys(one.fault for one in found if one.fault and "specbench fetch" not in one.fault)
    lines += [f"missing   {text}" for text in faults]
    return "\n".join(lines)


def _line(one: Forecast) -> str:
    cfg = one.run.config
    state = "finished" if not one.left else f"{one.left} images" + (f", {one.there} are there" if one.there else "")
    time = "" if not one.left else ", time unknown" if one.seconds is None else f", {_duration(one.seconds)}"
    what = f"{cfg['method']} on {cfg['model']}, seed {cfg['seed']}, n={cfg['n']}"
    batch = "" if parameters.is_served(cfg) else f", batch {cfg['batch']}"
    return f"{one.run.folder}: {what}{batch}: {state}{time}"


# --- what is there ----------------------------------------------------------------------------------------------------


def _forecast(run: PlannedRun, known: _Known) -> Forecast:
    from specbench.harness.run import check

    fault = ""
    try:
        check(run.config)
    except (UsageError, OSError) as e:
        fault = str(e)
    status = run.status()
    passes = [one for one in (status.images, status.baseline) if one is not None]
    count = run.config.images
    there = sum(min(one.done, count) for one in passes)
    images = count * (2 if run.config.wants_baseline else 1)
    seconds: float | None = 0.0
    exact = True
    for vanilla, progress in ((False, status.images), (True, status.baseline)):
        left = 0 if progress is None else max(0, count - progress.done)
        if left and seconds is not None:
            rate = known.rate(run.config, vanilla)
            seconds = None if rate is None else seconds + left * rate.seconds
            exact = exact and rate is not None and rate.exact
    return Forecast(run, images, min(there, images), seconds, exact, fault)


# --- time -------------------------------------------------------------------------------------------------------------


class _Known:
    """The rows of this machine in the store, and what they say."""

    def __init__(self) -> None:
        from specbench.rows import store

        path = store.default()
        self.rows: list[tuple[str, dict[str, Any]]] = []
        if path is not None and path.is_file():
            with suppress(UsageError):
                self.rows = store.read(path)[::-1]  # the newest first
        self._machines: dict[str, dict[str, Any]] = {}
        self._rates: dict[str, Rate | None] = {}

    def rate(self, cfg: Mapping[str, Any], vanilla: bool) -> Rate | None:
        key = json.dumps([vanilla, {name: value for name, value in cfg.items() if name not in _FREE}], default=str)
        if key not in self._rates:
            self._rates[key] = self._rate(cfg, vanilla)
        return self._rates[key]

    def _rate(self, cfg: Mapping[str, Any], vanilla: bool) -> Rate | None:
        same = [(folder, row) for folder, row in self.rows if self._is_here(row, cfg)]
        method = "vanilla" if vanilla else cfg["method"]
        exact = [one for one in same if one[1]["method"] == method and self._equal(one[1], cfg, vanilla)]
        for candidates, is_exact in ((exact, True), ([one for one in same if one[1]["method"] == method], False)):
            for folder, row in candidates:
                if seconds := _seconds(Path(folder), row):
                    return Rate(seconds, is_exact)
        return None

    def _is_here(self, row: Mapping[str, Any], cfg: Mapping[str, Any]) -> bool:
        """Whether a row is of this machine, of the same model, and as many images at once."""
        from specbench.harness.pipeline import resolve_device
        from specbench.rows import provenance

        if parameters.is_served(cfg):
            return False
        device = cfg["device"]
        if device not in self._machines:
            self._machines[device] = provenance.environment(resolve_device(device))
        here = self._machines[device]
        machine = all(row[name] == here[name] for name in ("device_name", "device", "threads"))
        return machine and all(row[name] == cfg[name] for name in ("model", "batch", "dtype", "engine"))

    @staticmethod
    def _equal(row: Mapping[str, Any], cfg: Mapping[str, Any], vanilla: bool) -> bool:
        from specbench.rows.csv_files import as_cells

        of_method = {*parameters.method_parameters(), *parameters.PARTS} if vanilla else set()
        names = [
            name for name in cfg if name in row and name not in (*_FREE, *of_method, "method", "device", "weights")
        ]
        mine, theirs = (as_cells({name: cells[name] for name in names}) for cells in (row, cfg))
        return mine == theirs

    def image_bytes(self, model: str) -> float | None:
        """Bytes of an image with its record, from a run that is here."""
        for folder, row in self.rows:
            images = list(Path(folder, "images").glob("*.png")) if row["model"] == model else []
            if images:
                records = Path(folder, "records.jsonl").stat().st_size if Path(folder, "records.jsonl").is_file() else 0
                return (sum(path.stat().st_size for path in images) + records) / len(images)
        return None


def _seconds(folder: Path, row: Mapping[str, Any]) -> float | None:
    """Seconds per image of a row, or of its run's records where the row has none."""
    if row["images_per_s"]:
        return 1 / row["images_per_s"] + (row["text_s"] or 0) + (row["pixels_s"] or 0)
    found = []
    for record in _records(folder / "records.jsonl"):
        with suppress(KeyError, TypeError, ValueError):
            found.append(float(record["decode_s"]) + float(record["text_s"]) + float(record["pixels_s"]))
    return sum(found) / len(found) if found else None


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines[-_RECENT:]:
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                yield found


def _time(found: Sequence[Forecast]) -> str:
    waiting = [one for one in found if one.left]
    known = [one for one in waiting if one.seconds is not None]
    if not waiting:
        return "none"
    unknown = (
        f"unknown for {len(waiting) - len(known)} of {len(waiting)} runs: the store has no such row of this machine"
    )
    if not known:
        return unknown
    text = f"{_duration(sum(one.seconds or 0 for one in known))} of decoding, one run after the other, without scoring"
    if rough := sum(not one.exact for one in known):
        text += f" ({rough} by the same method with other parameters)"
    return text if len(known) == len(waiting) else f"{text}; {unknown}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if seconds >= 1 else "under a second"


# --- disk, memory, downloads ------------------------------------------------------------------------------------------


def _disk(found: Sequence[Forecast], known: _Known) -> str:
    total, unknown = 0.0, set()
    for one in found:
        size = known.image_bytes(one.run.config["model"]) if one.left else 0
        if size is None:
            unknown.add(one.run.config["model"])
        else:
            total += one.left * size
    text = f"about {format_size(total)}" if total or not unknown else ""
    if unknown:
        return "; ".join(filter(None, [text, f"unknown for {', '.join(sorted(unknown))}: no run of it is here"]))
    return text


def _memory(found: Sequence[Forecast]) -> Iterator[str]:
    """Of each model's run with the most images at once: weights, caches and the estimated peak, from shapes alone."""
    largest: dict[str, RunConfig] = {}
    for one in found:
        cfg = one.run.config
        before = largest.get(cfg["model"])
        if one.left and not parameters.is_served(cfg) and (before is None or cfg["batch"] >= before["batch"]):
            largest[cfg["model"]] = cfg
    for model, cfg in largest.items():
        from specbench.bench import plan

        what = f"{model}, {cfg['method']}, batch {cfg['batch']}, {cfg['dtype']}"
        try:
            planned = plan.plan(cfg)
        except Exception as e:  # a plug-in's model may not work on shapes; nothing depends on this number
            yield f"unknown for {what} ({type(e).__name__})"
            continue
        peak = planned["peak_estimate_gb"] - planned["runtime_estimate_gb"]
        yield (
            f"{planned['all_weights_gb']:.3g} GB of weights and {planned['state_gb']:.3g} GB of caches, about"
            f" {peak:.3g} GB at the peak ({what})"
        )


def _downloads(runs: Sequence[PlannedRun]) -> list[str]:
    """What must be fetched first, with sizes where they are known without asking."""
    found: dict[str, None] = {}
    for run in runs:
        found |= dict.fromkeys(_of_model(run.config))
        found |= dict.fromkeys(_of_data(run.config))
        found |= dict.fromkeys(_of_metrics(run.config))
    return list(found)


def _of_model(cfg: Mapping[str, Any]) -> Iterator[str]:
    from specbench.config import registry
    from specbench.storage import sources

    folder = None if parameters.is_served(cfg) else registry.weights_folder(cfg)
    source = None if folder is None else registry.model_sources().get(cfg["model"])
    if folder is None or source is None:
        return
    for name in registry.needed_folders(cfg):
        part = sources.part_of(source, name)
        if part is not None and not (folder / name).is_dir():
            more = "" if name in source.parts else f" drafter={cfg['drafter']}"
            command = f"specbench fetch model={cfg['model']}{more}"
            yield f"{name}/ of {cfg['model']} from {part.repository} ({_sizes(part)}): {command}"


def _sizes(part: Any) -> str:
    return format_size(sum(part.sizes.values())) if part.sizes else "specbench fetch says how large"


def _of_data(cfg: Mapping[str, Any]) -> Iterator[str]:
    from specbench.config import registry
    from specbench.storage import downloads, home

    data = registry.data_sources().get(cfg["data"])
    if data is None:
        return
    folder = home.expanded(cfg.get("data_dir") or home.data_folder(cfg["data"]))
    record = downloads.FetchRecord(folder)
    if todo := [file for file in data.files if not downloads.is_unpacked(record, file, folder)]:
        yield f"{cfg['data']} ({format_size(sum(file.size for file in todo))}): specbench fetch data={cfg['data']}"


def _of_metrics(cfg: Mapping[str, Any]) -> Iterator[str]:
    from specbench import metrics
    from specbench.config import registry
    from specbench.harness.scoring import scoring_context

    context = scoring_context(cfg)
    for name in cfg["metrics"]:
        if not metrics.missing(name, context):
            continue
        parts = [registry.evaluators()[folder] for folder in registry.evaluator_folders(name)]
        sizes = ", ".join(f"{part.repository} ({_sizes(part)})" for part in parts)
        yield f"{name}: {sizes or metrics.missing(name, context)}: specbench fetch metrics={name}"
