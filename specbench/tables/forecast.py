"""Dry runs: images to decode and existing ones, time, disk, memory, downloads, and the commands in their order.

Time on this machine is known only from its rows below the current folder. Hours on a GPU, which need not exist, are
a range (`gpu_hours`). Unknown values are reported as unknown. Nothing is loaded, fetched or written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from specbench.bench import devices, to_fetch
from specbench.bench.devices import Device
from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.harness.pipeline import check_engine, resolve_device
from specbench.harness.planned import PlannedRun
from specbench.rows.csv_files import as_cells
from specbench.rows.journal import read_records
from specbench.storage import origin
from specbench.storage.files import format_size
from specbench.tables import gpu_hours
from specbench.tables.gpu_hours import Planner

_MOST = 40  # maximum number of runs that are listed one by one
_RECENT = 200  # records from which a speed is computed
_RECORD, _OF_TOKEN = 4000, 12  # maximum bytes of a record, besides its tokens; bytes per token
#: Parameters that do not change the time per image.
_FREE = (
    *("seed", "n", "images_per_prompt", "split", "data", "caption", "prompts"),
    *("timing", "warmup", "protocol", "variant", "emitted_draws"),
)


@dataclass(frozen=True)
class Forecast:
    """The forecast of one run. images, existing: of both passes; left_of: missing images of the method, and of its
    baseline; seconds: for the missing images, None if unknown; exact: whether they come from rows with the same
    parameters, not only the same method; fault: why it cannot start yet; hours: by GPU, minimum and maximum."""

    run: PlannedRun
    images: int
    existing: int
    left_of: tuple[int, int]
    seconds: float | None
    exact: bool
    fault: str
    hours: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return self.images - self.existing

    def line(self, chosen: Mapping[str, Device] | None) -> str:
        cfg = self.run.config
        what = f"{cfg['method']} on {cfg['model']}, seed {cfg['seed']}, n={cfg['n']}"
        state = f"{self.left} images" + (f", {self.existing} exist" if self.existing else "")
        if not self.left:
            state = "finished"
        elif self.seconds is not None:
            state += f", {_duration(self.seconds)}"
        elif not self.hours:
            state += ", time unknown"
        elif chosen:
            state += f", {as_text(self.hours[next(iter(chosen))])}"
        return f"{self.run.folder}: {what}, batch {cfg['batch']}: {state}"


@dataclass(frozen=True)
class DryRun:
    """The forecast of several runs together."""

    runs: Sequence[Forecast]
    planner: Planner

    @property
    def images(self) -> int:
        """The number of images to decode."""
        return sum(run.left for run in self.runs)

    @property
    def hours(self) -> dict[str, tuple[float, float]]:
        """By GPU, for the runs that have an estimate."""
        timed = [run.hours for run in self.runs if run.hours]
        return {
            name: (sum(hours[name][0] for hours in timed), sum(hours[name][1] for hours in timed))
            for name in (timed[0] if timed else ())
        }

    @property
    def disk(self) -> tuple[float, list[str]]:
        """Maximum bytes of images and records (three per pixel, as without compression), and the models for which they
        are unknown."""
        total, unknown = 0.0, dict[str, None]()
        for forecast in self.runs:
            cfg = forecast.run.config
            if not forecast.left:
                continue
            try:
                planned = self.planner.plan(cfg)
            except Exception:  # see `_of_gpus`
                unknown[cfg["model"]] = None
                continue
            total += forecast.left * (3 * planned["resolution"] ** 2 + _RECORD + _OF_TOKEN * planned["tokens"])
        return total, list(unknown)


def dry_run(
    runs: Sequence[PlannedRun], chosen: Mapping[str, Device] | None = None, results: Path = Path("results")
) -> DryRun:
    """chosen: the GPUs whose hours are computed (default: every known one, if a run is a real model's and not for the
    CPU); results: the folder of committed rows."""
    store, planner = _Store(), Planner(results)
    return DryRun([_forecast(run, store, planner, chosen) for run in runs], planner)


def report(
    title: str, runs: Sequence[PlannedRun], command: str, device_for: str | None = None, results: Path = Path("results")
) -> str:
    """The forecast of runs as text. command: starts them; device_for: the name of a GPU; results: see `dry_run`."""
    chosen = None if device_for is None else devices.named(device_for)
    if others := [run for run in runs if run.rows_of != "run"]:
        return f"dry run of {title}: {len(others)} lines by specbench {others[0].rows_of}, no images; then {command}"
    forecasts = dry_run(runs, chosen, results)
    images, existing = sum(f.images for f in forecasts.runs), sum(f.existing for f in forecasts.runs)
    size, fetch = to_fetch.report(runs, command)
    lines = [f"dry run of {title}: {len(runs)} run{'s' * (len(runs) != 1)}, nothing is decoded"]
    lines += [f"  {forecast.line(chosen)}" for forecast in forecasts.runs[:_MOST]]
    lines += [f"  ... and {len(runs) - _MOST} more runs"] if len(runs) > _MOST else []
    lines.append(f"decode    {images - existing} images, {existing} of {images} exist")
    lines.append(f"time      {_time(forecasts.runs)}")
    lines += _gpu(forecasts)
    lines.append(f"disk      {_disk(forecasts, size)}")
    lines += [f"memory    {text}" for text in _memory(forecasts)]
    # why runs cannot start, except for files to fetch, and which metrics would have no value
    faults = dict.fromkeys(f.fault for f in forecasts.runs if f.fault and "specbench fetch" not in f.fault)
    missing = (*faults, *to_fetch.unmeasured(f.run.config for f in forecasts.runs))
    return "\n".join([*lines, *(f"missing   {text}" for text in missing), *fetch])


def _forecast(run: PlannedRun, store: _Store, planner: Planner, chosen: Mapping[str, Device] | None) -> Forecast:
    fault = ""
    try:
        _check(run.config)
    except (UsageError, OSError) as e:
        fault = str(e)
    status, count = run.status(), run.config.images
    passes = (status.images, status.baseline)
    existing = sum(min(progress.done, count) for progress in passes if progress is not None)
    images = count * (2 if run.config.wants_baseline else 1)
    left_of = [0 if progress is None else max(0, count - progress.done) for progress in passes]
    rates = [store.rate(run.config, vanilla) if left else (0.0, True) for vanilla, left in enumerate(left_of)]
    seconds = [left * rate[0] for left, rate in zip(left_of, rates, strict=True) if rate is not None]
    return Forecast(
        run,
        images,
        min(existing, images),
        (left_of[0], left_of[1]),
        sum(seconds) if len(seconds) == len(rates) else None,
        all(rate is not None and rate[1] for rate in rates),
        fault,
        _of_gpus(run.config, left_of, planner, chosen),
    )


def _check(cfg: RunConfig) -> None:
    """`harness.run.check`, as on a machine that has the device of the configuration."""
    from specbench.harness.run import check

    if cfg["device"] != "cpu" and not torch.cuda.is_available():
        check_engine(cfg)
        cfg = cfg.changed(device="cpu", engine="eager")
    check(cfg)


# --- hours on a GPU ---------------------------------------------------------------------------------------------------


def _of_gpus(
    cfg: RunConfig, left_of: Sequence[int], planner: Planner, chosen: Mapping[str, Device] | None
) -> dict[str, tuple[float, float]]:
    """Hours by GPU; {} without requested GPUs, or if the model cannot be planned from shapes."""
    is_real = parameters.default("model", cfg["model"], "weights") == "official"
    if not any(left_of) or (chosen is None and (not is_real or cfg["device"] == "cpu")):
        return {}
    passes = zip(left_of, (cfg, gpu_hours.without_method(cfg)), strict=True)
    wanted = [(count, config) for count, config in passes if count]
    hours = {}
    try:
        for name, device in (chosen or devices.DEVICES).items():
            times = [(count, planner.seconds(config, device)) for count, config in wanted]
            low, high = (sum(count * seconds[i] for count, seconds in times) / 3600 for i in (0, 1))
            hours[name] = low, high
    except Exception as e:  # a plug-in's model may not work on shapes; nothing depends on these numbers
        source = f"unknown ({type(e).__name__}: {e}), and so are the hours, of"
        planner.sources.setdefault(source, set()).add(cfg["method"])
        return {}
    return hours


def _gpu(forecasts: DryRun) -> Iterator[str]:
    """Lines on the hours by GPU over all runs, and on their basis."""
    planner, timed = forecasts.planner, [forecast for forecast in forecasts.runs if forecast.hours]
    if timed:
        peak = max(planner.peak_gb(forecast.run.config) for forecast in timed)
        for name, hours in forecasts.hours.items():
            memory = devices.DEVICES[name].memory
            fits = "fits" if peak <= memory else "does not fit: choose a smaller batch, or another device"
            yield f"gpu       {name}: {as_text(hours)}; about {peak:.3g} of {memory:g} GB, {fits}"
        engines = (forecast.run.config["engine"] for forecast in timed)
        kinds = dict.fromkeys("recorded" if engine != "eager" else "started" for engine in engines)
        launches = ", ".join(f"{' to '.join(map(str, gpu_hours.LAUNCH_US[k]))} us for each {k} kernel" for k in kinds)
        yield (
            "basis     decoding alone, from shapes: bytes and arithmetic of a step at the data sheet's rates, or at"
            f" {gpu_hours.SHARE:.0%} of them and after its launches; {launches}. These are assumptions: no step has"
            " been timed on a GPU"
        )
    for source, names in planner.sources.items():
        yield f"basis     tokens a step: {source} {', '.join(sorted(names))}"


def as_text(hours: tuple[float, float]) -> str:
    """A range of hours as text."""
    low, high = hours
    if high < 1:
        return f"{60 * low:.2g} to {60 * high:.2g} min"
    return f"{low:.2g} to {high:.2g} h" if high < 100 else f"{low:.0f} to {high:.0f} h"


# --- time -------------------------------------------------------------------------------------------------------------


class _Store:
    """The rows of runs below the current folder, and the speeds in them."""

    def __init__(self) -> None:
        from specbench.rows import sources

        runs = [(str(path.parent), row) for path, row in sources.runs_in(Path()) if isinstance(row, dict)]
        self.rows = sorted(runs, key=lambda run: str(run[1]["time"]), reverse=True)
        self._machines: dict[str, dict[str, Any]] = {}
        self._rates: dict[str, tuple[float, bool] | None] = {}

    def rate(self, cfg: Mapping[str, Any], vanilla: bool | int) -> tuple[float, bool] | None:
        """Seconds per image of a configuration, or of its vanilla AR; and whether they come from rows with the same
        parameters, not only the same method."""
        key = json.dumps([vanilla, {name: value for name, value in cfg.items() if name not in _FREE}], default=str)
        if key not in self._rates:
            method = "vanilla" if vanilla else cfg["method"]
            same = [item for item in self.rows if item[1]["method"] == method and self._is_here(item[1], cfg)]
            exact = [item for item in same if _equal(item[1], cfg, bool(vanilla))]
            candidates = [(item, True) for item in exact] + [(item, False) for item in same]
            rates = ((seconds, is_exact) for item, is_exact in candidates if (seconds := _seconds(*item)))
            self._rates[key] = next(rates, None)
        return self._rates[key]

    def _is_here(self, row: Mapping[str, Any], cfg: Mapping[str, Any]) -> bool:
        """Whether a row comes from this machine, the same model, and the same number of images at once."""
        device = cfg["device"]
        if device.startswith("cuda") and not torch.cuda.is_available():
            return False
        if device not in self._machines:
            self._machines[device] = origin.environment(resolve_device(device))
        here = self._machines[device]
        machine = all(row[name] == here[name] for name in ("device_name", "device", "threads"))
        return machine and all(row[name] == cfg[name] for name in ("model", "batch", "dtype", "engine"))


def _equal(row: Mapping[str, Any], cfg: Mapping[str, Any], vanilla: bool) -> bool:
    """Whether a row has the parameters of a configuration, or of its vanilla AR, that change its speed."""
    of_method = (*parameters.method_parameters(), *parameters.PARTS) if vanilla else ()
    free = {*_FREE, *of_method, "method", "device", "weights"}
    names = [name for name in cfg if name in row and name not in free]
    cells_of_row, cells_of_cfg = (as_cells({name: values[name] for name in names}) for values in (row, cfg))
    return cells_of_row == cells_of_cfg


def _seconds(folder: str, row: Mapping[str, Any]) -> float | None:
    """Seconds per image of a row, or of its run's records if the row has none."""
    if row["images_per_s"]:
        return float(1 / row["images_per_s"] + (row["text_s"] or 0) + (row["pixels_s"] or 0))
    with suppress(UsageError, OSError):
        if records := read_records(Path(folder) / "records.jsonl")[-_RECENT:]:
            return fmean(record.decode_s + record.text_s + record.pixels_s for record in records)
    return None


def _time(runs: Sequence[Forecast]) -> str:
    waiting = [forecast for forecast in runs if forecast.left]
    known = [forecast for forecast in waiting if forecast.seconds is not None]
    if not waiting:
        return "none"
    unknown = (
        f"unknown for {len(waiting) - len(known)} of {len(waiting)} runs: no run here has such a row of this machine"
    )
    if not known:
        return unknown
    total = sum(forecast.seconds or 0 for forecast in known)
    text = f"{_duration(total)} of decoding, one run after the other, without scoring"
    if rough := sum(not forecast.exact for forecast in known):
        text += f" ({rough} estimated from the same method with other parameters)"
    return text if len(known) == len(waiting) else f"{text}; {unknown}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if seconds >= 1 else "under a second"


# --- disk and memory --------------------------------------------------------------------------------------------------


def _disk(forecasts: DryRun, download: float) -> str:
    total, unknown = forecasts.disk
    text = f"at most {format_size(total)} of images and records, by the model's resolution"
    text += f"; {format_size(download)} of downloads" if download else ""
    return text + (f"; unknown for {', '.join(unknown)}" if unknown else "")


def _memory(forecasts: DryRun) -> Iterator[str]:
    """For each model, the run with the most images at once: weights, caches and estimated peak, from shapes alone."""
    largest: dict[str, RunConfig] = {}
    for forecast in forecasts.runs:
        cfg = forecast.run.config
        before = largest.get(cfg["model"])
        if forecast.left and (before is None or cfg["batch"] >= before["batch"]):
            largest[cfg["model"]] = cfg
    for model, cfg in largest.items():
        what = f"{model}, {cfg['method']}, batch {cfg['batch']}, {cfg['dtype']}"
        try:
            planned = forecasts.planner.plan(cfg)
        except Exception as e:  # a plug-in's model may not work on shapes; nothing depends on this number
            yield f"unknown for {what} ({type(e).__name__})"
            continue
        peak = planned["peak_estimate_gb"] - planned["runtime_estimate_gb"]
        yield (
            f"{planned['all_weights_gb']:.3g} GB of weights and {planned['state_gb']:.3g} GB of caches, about"
            f" {peak:.3g} GB at the peak ({what})"
        )
