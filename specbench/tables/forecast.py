"""What runs will do before they do it: images to decode and those that are there, time, disk, memory, downloads, and
the commands in their order.

Time on this machine is known from its rows in the store of results alone; hours on a GPU that need not be here are a
range (`gpu_hours`). What is not known is said to be unknown. Nothing is loaded, fetched or written.
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

_MOST = 40  # runs that are listed one by one
_RECENT = 200  # records from which a speed is computed
_RECORD, _OF_TOKEN = 4000, 12  # bytes of a record at most, besides its tokens, and for each token
#: Parameters that do not change how fast an image is decoded.
_FREE = (
    *("seed", "n", "images_per_prompt", "split", "data", "caption", "prompts"),
    *("timing", "warmup", "protocol", "variant", "emitted_draws"),
)


@dataclass(frozen=True)
class Forecast:
    """What a run will do. images, there: of both passes; left_of: images of the method, and of its baseline; seconds:
    for what is left, None: unknown; exact: from rows of the same parameters, not only of the same method; fault: why it
    cannot start yet; hours: by GPU, the least and the most."""

    run: PlannedRun
    images: int
    there: int
    left_of: tuple[int, int]
    seconds: float | None
    exact: bool
    fault: str
    hours: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return self.images - self.there

    def line(self, chosen: Mapping[str, Device] | None) -> str:
        cfg = self.run.config
        what = f"{cfg['method']} on {cfg['model']}, seed {cfg['seed']}, n={cfg['n']}"
        batch = "" if parameters.is_served(cfg) else f", batch {cfg['batch']}"
        state = f"{self.left} images" + (f", {self.there} are there" if self.there else "")
        if not self.left:
            state = "finished"
        elif self.seconds is not None:
            state += f", {_duration(self.seconds)}"
        elif not self.hours:
            state += ", time unknown"
        elif chosen:
            state += f", {as_text(self.hours[next(iter(chosen))])}"
        return f"{self.run.folder}: {what}{batch}: {state}"


@dataclass(frozen=True)
class Foreseen:
    """What several runs will do together."""

    runs: Sequence[Forecast]
    planner: Planner

    @property
    def images(self) -> int:
        """To decode."""
        return sum(one.left for one in self.runs)

    @property
    def hours(self) -> dict[str, tuple[float, float]]:
        """By GPU, of the runs that have any."""
        timed = [one.hours for one in self.runs if one.hours]
        return {
            name: (sum(one[name][0] for one in timed), sum(one[name][1] for one in timed))
            for name in (timed[0] if timed else ())
        }

    @property
    def disk(self) -> tuple[float, list[str]]:
        """Bytes of images and records at most, three for each pixel as of an image that is not compressed; and the
        models of which they are not known."""
        total, unknown = 0.0, dict[str, None]()
        for one in self.runs:
            if not one.left or parameters.is_served(one.run.config):
                continue
            try:
                planned = self.planner.plan(one.run.config)
            except Exception:  # as for the hours
                unknown[one.run.config["model"]] = None
                continue
            total += one.left * (3 * planned["resolution"] ** 2 + _RECORD + _OF_TOKEN * planned["tokens"])
        return total, list(unknown)


def foresee(
    runs: Sequence[PlannedRun], chosen: Mapping[str, Device] | None = None, results: Path = Path("results")
) -> Foreseen:
    """chosen: the GPUs that hours are for (default: every known one, where a run is a real model's and not for the
    CPU); results: the folder of committed rows."""
    known, planner = _Known(), Planner(results)
    return Foreseen([_forecast(run, known, planner, chosen) for run in runs], planner)


def report(
    title: str, runs: Sequence[PlannedRun], command: str, device_for: str | None = None, results: Path = Path("results")
) -> str:
    """The forecast of runs as text. command: what starts them; device_for: the name of a GPU; results: as of
    `foresee`."""
    chosen = None if device_for is None else devices.named(device_for)
    if others := [run for run in runs if run.rows_of != "run"]:
        return f"dry run of {title}: {len(others)} lines by specbench {others[0].rows_of}, no images; then {command}"
    foreseen = foresee(runs, chosen, results)
    images, there = sum(one.images for one in foreseen.runs), sum(one.there for one in foreseen.runs)
    size, fetch = to_fetch.report(runs, command)
    lines = [f"dry run of {title}: {len(runs)} run{'s' * (len(runs) != 1)}, nothing is decoded"]
    lines += [f"  {one.line(chosen)}" for one in foreseen.runs[:_MOST]]
    lines += [f"  ... and {len(runs) - _MOST} more runs"] if len(runs) > _MOST else []
    lines.append(f"decode    {images - there} images, {there} of {images} are there")
    lines.append(f"time      {_time(foreseen.runs)}")
    lines += _gpu(foreseen)
    lines.append(f"disk      {_disk(foreseen, size)}")
    lines += [f"memory    {text}" for text in _memory(foreseen)]
    # why runs cannot start, apart from what a fetch brings, and which metrics would have no value
    faults = dict.fromkeys(one.fault for one in foreseen.runs if one.fault and "specbench fetch" not in one.fault)
    missing = (*faults, *to_fetch.unmeasured(one.run.config for one in foreseen.runs))
    return "\n".join([*lines, *(f"missing   {text}" for text in missing), *fetch])


def _forecast(run: PlannedRun, known: _Known, planner: Planner, chosen: Mapping[str, Device] | None) -> Forecast:
    fault = ""
    try:
        _check(run.config)
    except (UsageError, OSError) as e:
        fault = str(e)
    status, count = run.status(), run.config.images
    passes = (status.images, status.baseline)
    there = sum(min(one.done, count) for one in passes if one is not None)
    images = count * (2 if run.config.wants_baseline else 1)
    left_of = [0 if one is None else max(0, count - one.done) for one in passes]
    rates = [known.rate(run.config, vanilla) if left else (0.0, True) for vanilla, left in enumerate(left_of)]
    seconds = [left * rate[0] for left, rate in zip(left_of, rates, strict=True) if rate is not None]
    return Forecast(
        run,
        images,
        min(there, images),
        (left_of[0], left_of[1]),
        sum(seconds) if len(seconds) == len(rates) else None,
        all(rate is not None and rate[1] for rate in rates),
        fault,
        _of_gpus(run.config, left_of, planner, chosen),
    )


def _check(cfg: RunConfig) -> None:
    """As `harness.run.check`, for a machine that has the device of the configuration."""
    from specbench.harness.run import check

    if not parameters.is_served(cfg) and cfg["device"] != "cpu" and not torch.cuda.is_available():
        check_engine(cfg)
        cfg = cfg.changed(device="cpu", engine="eager")
    check(cfg)


# --- hours on a GPU ---------------------------------------------------------------------------------------------------


def _of_gpus(
    cfg: RunConfig, left_of: Sequence[int], planner: Planner, chosen: Mapping[str, Device] | None
) -> dict[str, tuple[float, float]]:
    """Hours by GPU; empty where none are asked for, or the model cannot be planned on shapes."""
    is_real = parameters.default("model", cfg["model"], "weights") == "official"
    if parameters.is_served(cfg) or not any(left_of) or (chosen is None and (not is_real or cfg["device"] == "cpu")):
        return {}
    passes = zip(left_of, (cfg, gpu_hours.without_method(cfg)), strict=True)
    wanted = [(count, one) for count, one in passes if count]
    hours = {}
    try:
        for name, device in (chosen or devices.DEVICES).items():
            each = [(count, planner.seconds(one, device)) for count, one in wanted]
            low, high = (sum(count * seconds[i] for count, seconds in each) / 3600 for i in (0, 1))
            hours[name] = low, high
    except Exception as e:  # a plug-in's model may not work on shapes; nothing depends on these numbers
        source = f"unknown ({type(e).__name__}: {e}), and so are the hours, of"
        planner.sources.setdefault(source, set()).add(cfg["method"])
        return {}
    return hours


def _gpu(foreseen: Foreseen) -> Iterator[str]:
    """Hours by GPU over all runs, and what they rest on."""
    planner, timed = foreseen.planner, [one for one in foreseen.runs if one.hours]
    if timed:
        peak = max(planner.peak_gb(one.run.config) for one in timed)
        for name, hours in foreseen.hours.items():
            memory = devices.DEVICES[name].memory
            fits = "fits" if peak <= memory else "does not fit: choose a smaller batch, or another device"
            yield f"gpu       {name}: {as_text(hours)}; about {peak:.3g} of {memory:g} GB, {fits}"
        kinds = dict.fromkeys("recorded" if one.run.config["engine"] != "eager" else "started" for one in timed)
        launches = ", ".join(f"{' to '.join(map(str, gpu_hours.LAUNCH_US[k]))} us for each {k} kernel" for k in kinds)
        yield (
            "basis     decoding alone, from shapes: bytes and arithmetic of a step at the data sheet's rates, or at"
            f" {gpu_hours.SHARE:.0%} of them and after its launches; {launches}. These are assumptions: no step has"
            " been timed on a GPU"
        )
    for source, names in planner.sources.items():
        yield f"basis     tokens a step: {source} {', '.join(sorted(names))}"


def as_text(hours: tuple[float, float]) -> str:
    """A range of hours."""
    low, high = hours
    if high < 1:
        return f"{60 * low:.2g} to {60 * high:.2g} min"
    return f"{low:.2g} to {high:.2g} h" if high < 100 else f"{low:.0f} to {high:.0f} h"


# --- time -------------------------------------------------------------------------------------------------------------


class _Known:
    """The rows of this machine in the store, and what they say."""

    def __init__(self) -> None:
        from specbench.rows import sources

        path = sources.default_store()
        self.rows: list[tuple[str, dict[str, Any]]] = []
        if path is not None and path.is_file():
            with suppress(UsageError):
                self.rows = sources.read_store(path)[::-1]  # the newest first
        self._machines: dict[str, dict[str, Any]] = {}
        self._rates: dict[str, tuple[float, bool] | None] = {}

    def rate(self, cfg: Mapping[str, Any], vanilla: bool | int) -> tuple[float, bool] | None:
        """Seconds per image of a configuration, or of its vanilla AR; and whether they are of the same parameters, not
        only of the same method."""
        key = json.dumps([vanilla, {name: value for name, value in cfg.items() if name not in _FREE}], default=str)
        if key not in self._rates:
            method = "vanilla" if vanilla else cfg["method"]
            same = [one for one in self.rows if one[1]["method"] == method and self._is_here(one[1], cfg)]
            exact = [one for one in same if _equal(one[1], cfg, bool(vanilla))]
            rates = ((seconds, some is exact) for some in (exact, same) for one in some if (seconds := _seconds(*one)))
            self._rates[key] = next(rates, None)
        return self._rates[key]

    def _is_here(self, row: Mapping[str, Any], cfg: Mapping[str, Any]) -> bool:
        """Whether a row is of this machine, of the same model, and as many images at once."""
        device = cfg["device"]
        if parameters.is_served(cfg) or (device.startswith("cuda") and not torch.cuda.is_available()):
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
    mine, theirs = (as_cells({name: cells[name] for name in names}) for cells in (row, cfg))
    return mine == theirs


def _seconds(folder: str, row: Mapping[str, Any]) -> float | None:
    """Seconds per image of a row, or of its run's records where the row has none."""
    if row["images_per_s"]:
        return float(1 / row["images_per_s"] + (row["text_s"] or 0) + (row["pixels_s"] or 0))
    with suppress(UsageError, OSError):
        if records := read_records(Path(folder) / "records.jsonl")[-_RECENT:]:
            return fmean(one.decode_s + one.text_s + one.pixels_s for one in records)
    return None


def _time(runs: Sequence[Forecast]) -> str:
    waiting = [one for one in runs if one.left]
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


# --- disk and memory --------------------------------------------------------------------------------------------------


def _disk(foreseen: Foreseen, download: float) -> str:
    total, unknown = foreseen.disk
    text = f"at most {format_size(total)} of images and records, by the model's resolution"
    text += f"; {format_size(download)} of downloads" if download else ""
    return text + (f"; unknown for {', '.join(unknown)}" if unknown else "")


def _memory(foreseen: Foreseen) -> Iterator[str]:
    """Of each model's run with the most images at once: weights, caches and the estimated peak, from shapes alone."""
    largest: dict[str, RunConfig] = {}
    for one in foreseen.runs:
        cfg = one.run.config
        before = largest.get(cfg["model"])
        if one.left and not parameters.is_served(cfg) and (before is None or cfg["batch"] >= before["batch"]):
            largest[cfg["model"]] = cfg
    for model, cfg in largest.items():
        what = f"{model}, {cfg['method']}, batch {cfg['batch']}, {cfg['dtype']}"
        try:
            planned = foreseen.planner.plan(cfg)
        except Exception as e:  # a plug-in's model may not work on shapes; nothing depends on this number
            yield f"unknown for {what} ({type(e).__name__})"
            continue
        peak = planned["peak_estimate_gb"] - planned["runtime_estimate_gb"]
        yield (
            f"{planned['all_weights_gb']:.3g} GB of weights and {planned['state_gb']:.3g} GB of caches, about"
            f" {peak:.3g} GB at the peak ({what})"
        )
