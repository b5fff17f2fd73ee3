"""Dry runs: images to decode and existing ones, hours, disk, memory, downloads, and the commands in their order.

Hours are those of the nearest measured steps (`bench.steps`). What is not known is reported as unknown. Nothing is
loaded or fetched, and only the plans of configurations are written: `storage.home.plan_file`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from specbench.bench import devices, needs, steps, to_fetch
from specbench.bench.devices import DEVICES, Device
from specbench.bench.needs import ImageNeeds, Needs
from specbench.bench.steps import MeasuredStep
from specbench.config import parameters, registry
from specbench.config.run_config import RunConfig
from specbench.data import Item, images_of
from specbench.errors import MissingFilesError, UsageError
from specbench.harness import run as running
from specbench.harness.folder import RunFolder
from specbench.harness.method import shape_of
from specbench.harness.planned import PlannedRun
from specbench.storage.files import format_size, sha256, write_atomically
from specbench.storage.home import plan_file
from specbench.storage.reading import read_json

T = TypeVar("T", ImageNeeds, Needs)

_MOST = 40  # maximum number of runs that are listed one by one
_RECORD, _OF_TOKEN = 4000, 12  # maximum bytes of a record, besides its tokens; bytes per token
#: Parameters of a run that do not change its memory.
_FREE = frozenset(
    "seed n images_per_prompt split data caption prompts data_dir timing warmup protocol variant metrics metrics_dir"
    " reference baseline device out log workers ray_address".split()
)


@dataclass(frozen=True)
class Forecast:
    """The forecast of one run. images, existing: of both passes; hours: by device, None if unknown; fault: why
    the run would be refused now, None if it would start."""

    run: PlannedRun
    images: int
    existing: int
    hours: Mapping[str, float | None]
    fault: UsageError | None

    @property
    def waits_for_fetch(self) -> bool:
        """Whether only files that `specbench fetch` downloads are missing."""
        return isinstance(self.fault, MissingFilesError) and self.fault.is_published

    @property
    def left(self) -> int:
        return self.images - self.existing

    def line(self) -> str:
        cfg = self.run.config
        what = f"{cfg.method} on {cfg.model}, seed {cfg.seed}, n={cfg.n}, batch {cfg.batch}"
        state = f"{self.left} images" + (f", {self.existing} exist" if self.existing else "")
        if self.left and len(self.hours) == 1:
            state += f", {as_text(next(iter(self.hours.values())))}"
        return f"{self.run.folder}: {what}: {state if self.left else 'finished'}"


@dataclass
class Planner:
    """Plans, hours and checks of configurations. basis: what the hours rest on."""

    results: Path
    basis: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps, self.lengths = steps.read(self.results), steps.tokens_per_step(self.results)
        self._needs: dict[str, Any] = {}  # see `_once`
        self._items: dict[str, list[Item]] = {}

    def fault(self, run: PlannedRun, left: bool) -> UsageError | None:
        """Why a run would be refused now: `harness.run.prepare`, as on a machine that has the run's device, and what
        its model refuses, if images are left to decode. MissingFilesError only if nothing else is wrong."""
        missing: MissingFilesError | None = None
        try:
            running.prepare(run.config, RunFolder(run.folder), dry=True, load=self._load)
        except MissingFilesError as e:
            missing = e
        except UsageError as e:
            return e
        except OSError as e:
            return UsageError(f"cannot write into {run.folder} ({e.strerror}); choose another out=")
        planned = self._once(_vanilla(run.config), needs.size, ImageNeeds) if left else None
        return planned if isinstance(planned, UsageError) else missing

    def _load(self, cfg: RunConfig) -> list[Item]:
        """The prompts of a run. Runs with the same prompts read them once."""
        names = {"data", "n", "images_per_prompt", "shard", "seed"} | parameters.declared("data", cfg.data)
        key = json.dumps({name: cfg.get(name) for name in sorted(names)}, default=str)
        if key not in self._items:
            self._items[key] = images_of(cfg)
        return self._items[key]

    def plan(self, cfg: RunConfig) -> Needs | None:
        """The needs of a configuration; None for a plug-in's model that does not work on shapes."""
        return _known(self._once(cfg, needs.plan, Needs))

    def _once(self, cfg: RunConfig, make: Callable[[RunConfig], T], kind: type[T]) -> T | UsageError | None:
        """What `make` gives, the mistake in the configuration, or None for a model that does not work on shapes."""
        free = _FREE | parameters.declared("rule", cfg.rule)
        values = {name: value for name, value in cfg.plain().items() if name not in free}
        key = kind.__name__ + json.dumps(values, default=str, sort_keys=True)
        if key not in self._needs:
            is_shipped = not parameters.plugins_of(cfg.plain())
            try:
                self._needs[key] = _stored(key, kind, lambda: make(cfg)) if is_shipped else make(cfg)
            except UsageError as e:
                self._needs[key] = e
            except Exception:  # whatever a plug-in raises; nothing depends on these numbers
                self._needs[key] = None
        result: T | UsageError | None = self._needs[key]
        return result

    def of_image(self, cfg: RunConfig) -> ImageNeeds | None:
        """The needs of one image of a model's vanilla AR."""
        return _known(self._once(_vanilla(cfg), needs.size, ImageNeeds))

    def hours(self, cfg: RunConfig, left_of: Sequence[int], device: str) -> float | None:
        """Hours of the missing images of a method, and of its baseline; None if no such step was measured."""
        planned, total = self.of_image(cfg), 0.0
        for count, config in zip(left_of, (cfg, without_method(cfg)), strict=True):
            if count:
                found = planned and steps.nearest(self.steps, _step(config, planned.forward_gb, device))
                if not planned or not found:
                    return None
                length, source = self._tokens_per_step(config, planned.tokens)
                self.basis |= dict.fromkeys([str(found[0]), *source])
                total += count * planned.tokens / length * found[1] / config.batch
        return total / 3.6e6

    def _tokens_per_step(self, cfg: RunConfig, tokens: int) -> tuple[float, list[str]]:
        """Of rows of the method on the model, else on any model; 1 without a row. And the source in words."""
        method = cfg.method
        if method == "vanilla":
            return tokens / (cfg.own.get("iterations") or tokens), []
        all_models = [(name, length) for (name, other), length in self.lengths.items() if other == method]
        rows = [(name, length) for name, length in all_models if name == cfg.model] or all_models
        if not rows:
            return 1.0, [f"{method} without rows, taken as one token a step"]
        length = sum(length for _, length in rows) / len(rows)
        return length, [f"{method} {length:.3g} tokens a step in rows of {', '.join(name for name, _ in rows)}"]


def _known(planned: T | UsageError | None) -> T | None:
    return None if isinstance(planned, UsageError) else planned


def _vanilla(cfg: RunConfig) -> RunConfig:
    """The vanilla AR of a model, one image at once."""
    return without_method(cfg).changed(batch=1, engine="eager")


def _stored(key: str, kind: type[T], make: Callable[[], T]) -> T:
    """What an earlier dry run computed with the same code, or a new result: it takes seconds."""
    file = plan_file(sha256(f"{_code()} {key}", 16))
    with suppress(UsageError):  # missing or damaged
        stored: T = read_json(file, kind)
        return stored
    result = make()
    with suppress(OSError):  # a folder that cannot be written
        write_atomically(file, json.dumps(asdict(result)).encode())
    return result


@cache
def _code() -> str:
    """A hash of the package's sources and configurations."""
    files = [*Path(__file__).parents[1].rglob("*.py"), *parameters.conf_dir().rglob("*.yaml")]
    return sha256("".join(sha256(path.read_bytes()) for path in sorted(files)))


def _step(cfg: RunConfig, gb: float, device: str) -> MeasuredStep:
    """The step of a configuration whose time is asked for."""
    network = registry.drafter_network(cfg.drafter) is not None
    width, continuous = shape_of(cfg).tree.nodes * cfg.batch, parameters.is_continuous("model", cfg.model)
    return MeasuredStep(cfg.method, device, device, cfg.engine, width, network, continuous, gb)


def without_method(cfg: RunConfig) -> RunConfig:
    """The vanilla AR of a configuration, with one token per pass."""
    method = {"method": "vanilla", "drafter": "none", "rule": "exact", "verification": "token"}
    kept = {name: value for name, value in cfg.plain().items() if name not in parameters.method_parameters()}
    singly = {"iterations": None} if "iterations" in kept else {}
    return RunConfig.of({**kept, **method, **singly})


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
    def hours(self) -> dict[str, float | None]:
        """By device, of all runs; None if it is unknown for one of them."""
        waiting = [run for run in self.runs if run.left]
        names = dict.fromkeys(name for run in waiting for name in run.hours)
        by_name = {name: [run.hours[name] for run in waiting if name in run.hours] for name in names}
        return {name: None if None in hours else sum(filter(None, hours)) for name, hours in by_name.items()}

    @property
    def mistakes(self) -> list[str]:
        """Why runs would be refused, apart from files that are not here."""
        faults = (run.fault for run in self.runs)
        return list(dict.fromkeys(str(fault) for fault in faults if fault and not isinstance(fault, MissingFilesError)))

    @property
    def disk(self) -> tuple[float, list[str]]:
        """Maximum bytes of images and records (three per pixel, as without compression), and the models for which they
        are unknown."""
        total, unknown = 0.0, dict[str, None]()
        for forecast in self.runs:
            planned = self.planner.of_image(forecast.run.config) if forecast.left else None
            if planned:
                total += forecast.left * (3 * planned.resolution**2 + _RECORD + _OF_TOKEN * planned.tokens)
            elif forecast.left:
                unknown[forecast.run.config.model] = None
        return total, list(unknown)

    def memory(self) -> list[str]:
        """For each model, the run with the most images at once, and the GPUs whose memory is smaller."""
        largest: dict[str, RunConfig] = {}
        for cfg in (forecast.run.config for forecast in self.runs if forecast.left):
            if cfg.model not in largest or cfg.batch >= largest[cfg.model].batch:
                largest[cfg.model] = cfg
        lines = []
        for model, cfg in largest.items():
            what, planned = f"{model}, {cfg.method}, batch {cfg.batch}, {cfg.dtype}", self.planner.plan(cfg)
            if planned is None:
                lines.append(f"unknown for {what}")
                continue
            peak = planned.peak_estimate_gb
            sizes = {name: DEVICES[name].memory for name in self.hours if name in DEVICES}
            small = [f"{name} ({size:g} GB)" for name, size in sizes.items() if peak > size]
            fits = f", more than {', '.join(small)}" if small else f", fits {', '.join(sizes)}" if sizes else ""
            parts = f"{planned.all_weights_gb:.3g} GB of weights, {planned.state_gb:.3g} GB of caches and buffers"
            lines.append(f"{what}: {parts}; about {peak:.3g} GB at the peak{fits}")
        return lines


def dry_run(
    runs: Sequence[PlannedRun], chosen: Mapping[str, Device] | None = None, results: Path = Path("results")
) -> DryRun:
    """chosen: the GPUs whose hours are computed (default: the CPU, if it decodes, or every known GPU); results: the
    folder of rows from which hours are taken."""
    planner = Planner(results)
    return DryRun([_forecast(run, planner, chosen) for run in runs], planner)


def report(
    title: str, runs: Sequence[PlannedRun], command: str, device_for: str | None = None, results: Path = Path("results")
) -> tuple[str, UsageError | None]:
    """The forecast of runs as text, and the error of those that would be refused. command: starts them; device_for: the
    name of a GPU; results: see `dry_run`."""
    chosen = None if device_for is None else devices.named(device_for)
    if others := [run for run in runs if run.rows_of != "run"]:
        text = f"dry run of {title}: {len(others)} lines by specbench {others[0].rows_of}, no images; then {command}"
        return text, None
    todo = dry_run(runs, chosen, results)
    (size, fetch), (disk, unknown) = to_fetch.report(runs, command), todo.disk
    images = sum(forecast.images for forecast in todo.runs)
    lines = [f"dry run of {title}: {len(runs)} run{'s' * (len(runs) != 1)}, nothing is decoded"]
    lines += [f"  {forecast.line()}" for forecast in todo.runs[:_MOST]]
    lines += [f"  ... and {len(runs) - _MOST} more runs"] if len(runs) > _MOST else []
    lines.append(f"decode    {todo.images} images, {images - todo.images} of {images} exist")
    lines += [f"time      {name}: {as_text(hours)}" for name, hours in todo.hours.items()]
    if todo.planner.basis:
        lines.append(f"basis     decoding alone, by the nearest measured steps: {'; '.join(todo.planner.basis)}")
    if None in todo.hours.values():
        lines.append(
            "basis     unknown: no such step was measured; specbench bench out=results/bench/NAME.csv keeps one"
        )
    lines.append(f"disk      at most {format_size(disk)} of images and records, {format_size(size)} of downloads")
    lines[-1] += f"; unknown for {', '.join(unknown)}" if unknown else ""
    lines += [f"memory    {text}" for text in todo.memory()]
    # why runs cannot start, except for files to fetch, and which metrics would have no value
    faults = dict.fromkeys(str(f.fault) for f in todo.runs if f.fault and not f.waits_for_fetch)
    missing = (*faults, *to_fetch.unmeasured(f.run.config for f in todo.runs))
    mistakes = todo.mistakes
    return "\n".join([*lines, *(f"missing   {text}" for text in missing), *fetch]), (
        UsageError("; ".join(mistakes)) if mistakes else None
    )


def _forecast(run: PlannedRun, planner: Planner, chosen: Mapping[str, Device] | None) -> Forecast:
    cfg, status = run.config, run.status()
    done, done_of_baseline = (0 if p is None else min(p.done, cfg.images) for p in (status.images, status.baseline))
    left_of = cfg.images - done, cfg.images - done_of_baseline if cfg.wants_baseline else 0
    images = cfg.images * (2 if cfg.wants_baseline else 1)
    is_real = parameters.default("model", cfg.model, "weights") == "official"
    on_cpu = cfg.device == "cpu" or (not is_real and not torch.cuda.is_available())
    names = chosen or (["cpu"] if on_cpu else DEVICES)
    hours = {name: planner.hours(cfg, left_of, name) for name in names} if any(left_of) else {}
    return Forecast(run, images, images - sum(left_of), hours, planner.fault(run, any(left_of)))


def as_text(hours: float | None) -> str:
    if hours is None:
        return "unknown"
    return f"{60 * hours:.2g} min" if hours < 1 else f"{hours:.2g} h" if hours < 100 else f"{hours:.0f} h"
