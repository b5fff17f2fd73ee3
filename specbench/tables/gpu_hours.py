"""Estimates for a GPU that need not exist here: hours as a range, and memory, from shapes alone.

The minimum time of a step is the largest of three: reading its bytes at the data sheet's bandwidth, its arithmetic at
the data sheet's rate, and starting its kernels at the lower figure of `LAUNCH_US`. The maximum is `1 / SHARE` times the
larger of the first two, plus its launches at the higher figure. `tokens_per_step` determines the number of steps of an
image. Work before and after decoding is not included: texts, pixels, scores, and loading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from specbench.bench import plan
from specbench.bench.devices import Device
from specbench.config import configuration, parameters, registry
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.harness.method import shape_of
from specbench.tables import literature
from specbench.tables.definitions import DEFAULT_MODEL
from specbench.tables.measure import rows_in

#: Microseconds per kernel of a step, started by the host or by a recorded graph. These are assumptions, since no step
#: has been timed on a GPU.
LAUNCH_US = {"started": (4.0, 12.0), "recorded": (1.5, 5.0)}
SHARE = 0.5  # minimum share of a data sheet's rates that is reached: also an assumption
#: Parameters of a run that change neither the shapes nor the number of launches of its steps.
_FREE = frozenset(
    "seed n images_per_prompt split data caption prompts data_dir timing warmup protocol variant metrics metrics_dir"
    " reference baseline device out log workers ray_address".split()
)
Seconds = tuple[float, float]


@dataclass
class Planner:
    """Plans of configurations, each made once. results: the folder with the embedded model's rows."""

    results: Path
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)  # source of the tokens per step -> names

    def plan(self, cfg: Mapping[str, Any]) -> dict[str, Any]:
        """The plan of `bench.plan`. If launches cannot be counted, it has the launches of engine=graph."""
        free = _FREE | parameters.declared("rule", cfg["rule"])
        key = json.dumps({name: value for name, value in cfg.items() if name not in free}, default=str, sort_keys=True)
        if key not in self.plans:
            made = plan.plan(cfg)
            if made.get("launches", {}) is None:
                made["launches"] = plan.plan({**cfg, "engine": "graph"})["launches"]
            self.plans[key] = made
        return self.plans[key]

    def peak_gb(self, cfg: Mapping[str, Any]) -> float:
        return float(self.plan(cfg)["peak_estimate_gb"])

    def seconds(self, cfg: Mapping[str, Any], device: Device) -> Seconds:
        """Minimum and maximum seconds of one image."""
        if parameters.is_continuous("model", cfg["model"]):
            return self._continuous(cfg, device)
        planned = self.plan(cfg)
        made = tokens_per_step(cfg, planned["tokens"], shape_of(cfg).height + 1, self.results)
        if made.source:
            self.sources.setdefault(made.source, set()).update(made.names)
        low, high = _of_part(planned, "step", device, planned["launches"], cfg["engine"] != "eager")
        steps = planned["tokens"] / made.high, planned["tokens"] / made.low
        return steps[0] * low / cfg["batch"], steps[1] * high / cfg["batch"]

    def _continuous(self, cfg: Mapping[str, Any], device: Device) -> Seconds:
        planned, vanilla = self.plan(cfg), self.plan(without_method(cfg))
        length, batch = planned["tokens"], cfg["batch"]
        alone = _token(cfg, vanilla, device)
        gamma = cfg.get("gamma", 0)
        if not gamma:
            passes = cfg.get("iterations") or length
            return passes * alone[0] / batch, passes * alone[1] / batch
        draft = drafter_alone(cfg)
        drafted = _token(cfg, self.plan(draft), device)
        verified = (
            _of_part(vanilla, "forward", device, vanilla["launches"]["forward"], False)[0],
            _of_part(planned, "forward", device, planned["launches"]["forward"], False)[1],
        )
        first = round(length * cfg.get("prefill", 0.0))
        self.sources.setdefault("from every draft kept to none, of", set()).add(cfg["method"])
        low = first * alone[0] + (length - first) * drafted[0] + math.ceil((length - first) / gamma) * verified[0]
        rejected = drafted[1] if cfg["on_reject"] == "continue" else gamma * drafted[1] + verified[1]
        return low / batch, (length * (alone[1] + rejected) + verified[1]) / batch


def without_method(cfg: Mapping[str, Any]) -> RunConfig:
    """The vanilla AR of a configuration, with one token per pass."""
    method = {"method": "vanilla", "drafter": "none", "rule": "exact", "verification": "token"}
    kept = {name: value for name, value in cfg.items() if name not in parameters.method_parameters()}
    singly = {"iterations": None} if "iterations" in kept else {}
    return RunConfig({**kept, **method, **singly})


def drafter_alone(cfg: Mapping[str, Any]) -> RunConfig:
    """The vanilla AR of the model whose target drafts here. UsageError if no model has this target."""
    source = registry.model_sources().get(cfg["model"])
    part = source.drafters.get("draft") if source else None
    for name, other in registry.model_sources().items():
        if part is not None and other.parts["target"] == part:
            shared = [f"{key}={cfg[key]}" for key in ("batch", "engine", "dtype", "cfg_scale", "diffusion_steps")]
            return configuration.compose([f"model={name}", "method=vanilla", *shared])
    raise UsageError(f"the drafter of {cfg['model']} is not a model of its own")


def _token(cfg: Mapping[str, Any], planned: Mapping[str, Any], device: Device) -> Seconds:
    """Seconds of a pass and the trajectory of its token. The host starts the pass, the engine the trajectory."""
    count, recorded = planned["launches"], cfg["engine"] != "eager"
    forward = _of_part(planned, "forward", device, count["forward"], False)
    step = _of_part(planned, "diffusion_step", device, {"step": count["diffusion_step"]}, recorded)
    steps = cfg["diffusion_steps"]
    return forward[0] + steps * step[0], forward[1] + steps * step[1]


def _of_part(
    planned: Mapping[str, Any], part: str, device: Device, launches: Mapping[str, Any], recorded: bool
) -> Seconds:
    """Seconds of one part of a step."""
    count = sum(n for n in launches.values() if isinstance(n, int))
    rate = (device.operations or {}).get(planned["dtype"])
    done = planned["tera_operations"][part] / rate if rate else 0.0
    least = max(planned["reads_gb"][part] / device.bandwidth, done)
    low, high = (1e-6 * count * us for us in LAUNCH_US["recorded" if recorded else "started"])
    return max(least, low), least / SHARE + high


# --- tokens of a step -------------------------------------------------------------------------------------------------

#: Columns of published files that distinguish lines of one method -> the parameter.
_PARAMETERS = {name: name for name in ("delta", "nu", "k", "window", "gamma", "temperature", "top_k")} | {
    "lambda": "lam"
}


@dataclass(frozen=True)
class TokensPerStep:
    """The minimum and the maximum that are known, their source, and what it covers: names of tables, or of methods."""

    low: float
    high: float
    source: str = ""
    names: tuple[str, ...] = ()


def tokens_per_step(cfg: Mapping[str, Any], tokens: int, most: int, results: Path) -> TokensPerStep:
    """The tokens per step of a method on a model whose images have this number of `tokens`, as far as they are known
    before a run: from papers' values for the method on the model; else from the embedded model's rows in the folder
    `results`; else the bounds of the draft, with at most `most` tokens per step."""
    if cfg["method"] == "vanilla":
        return TokensPerStep(1, 1)
    key = cfg["model"], cfg["method"]
    lines = [(table, row) for table, row in _published() if (row.model_name, row.method_key) == key]
    printed = [(table, row, value) for table, row in lines if (value := _of_line(row.cells, tokens))]
    same = [entry for entry in printed if _is_like(entry[1].cells, cfg)]
    if values := {value: table for table, _, value in same or printed}:
        return TokensPerStep(min(values), max(values), f"printed for {cfg['model']} in", tuple(values.values()))
    embedded = _embedded(cfg["method"], results)
    if embedded:
        low, high = max(1.0, min(embedded)), max(embedded)
        return TokensPerStep(low, high, "only from the embedded model's rows of", (cfg["method"],))
    return TokensPerStep(1, most, "from one token to the whole draft, since nothing is known about", (cfg["method"],))


@cache
def _published() -> tuple[tuple[str, literature.PublishedRow], ...]:
    return tuple((table, row) for table in literature.available() for row in literature.load(table))


def _is_like(cells: Mapping[str, str], cfg: Mapping[str, Any]) -> bool:
    """Whether a printed line has the parameters of a configuration, as far as it states them."""
    for column, name in _PARAMETERS.items():
        stated = cells.get(column)
        if stated and cfg.get(name) is not None:
            with suppress(TypeError, ValueError):
                if float(stated) != float(cfg[name]):
                    return False
    return True


def _of_line(cells: Mapping[str, str], tokens: int) -> float | None:
    """Tokens per step: an accepted length, a step compression, or an image's tokens over its steps."""
    for column in ("accepted_length_mean", "speedup_step", "steps"):
        if cells[column]:
            value = float(cells[column])
            return tokens / value if column == "steps" else value
    return None


def _embedded(method: str, results: Path) -> list[float]:
    rows = rows_in(results) if results.is_dir() else []
    matches = [row for row in rows if (row.get("model"), row.get("method")) == (DEFAULT_MODEL, method)]
    return [float(row["accepted_length_mean"]) for row in matches if row.get("accepted_length_mean")]
