"""What runs would take on a GPU that is not here: hours as a range, and memory, from shapes alone.

A step takes at least as long as reading its bytes at the data sheet's bandwidth, as its arithmetic at the data sheet's
rate, and as starting its kernels at the lower figure of `LAUNCH_US`. At most it takes `1 / SHARE` times the first two
and, one after the other, its launches at the higher figure. `tokens_per_step` says how many steps an image has. What
comes before and after decoding is not in it: texts, pixels, scores, and loading.
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

#: Microseconds for each kernel of a step, whether the host starts it or a recorded graph does: assumptions, since no
#: step has been timed on a GPU.
LAUNCH_US = {"started": (4.0, 12.0), "recorded": (1.5, 5.0)}
SHARE = 0.5  # of a data sheet's rates that is reached at least: an assumption, too
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
    sources: dict[str, set[str]] = field(default_factory=dict)  # of the tokens of a step: where from -> names

    def plan(self, cfg: Mapping[str, Any]) -> dict[str, Any]:
        """The plan of `bench.plan`; where launches cannot be counted, with the launches of engine=graph."""
        free = _FREE | parameters.declared("rule", cfg["rule"])
        key = json.dumps({name: value for name, value in cfg.items() if name not in free}, default=str, sort_keys=True)
        if key not in self.plans:
            found = plan.plan(cfg)
            if found.get("launches", {}) is None:
                found["launches"] = plan.plan({**cfg, "engine": "graph"})["launches"]
            self.plans[key] = found
        return self.plans[key]

    def peak_gb(self, cfg: Mapping[str, Any]) -> float:
        return float(self.plan(cfg)["peak_estimate_gb"])

    def seconds(self, cfg: Mapping[str, Any], device: Device) -> Seconds:
        """Of one image."""
        if parameters.is_continuous("model", cfg["model"]):
            return self._continuous(cfg, device)
        planned = self.plan(cfg)
        if parameters.kind("model", cfg["model"]) == "ordered":
            passes = planned["passes"]
            low, high = _of_part(planned, "step", device, planned["launches"], cfg["engine"] != "eager")
            return passes * low / cfg["batch"], passes * high / cfg["batch"]
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
        each = drafted[1] if cfg["on_reject"] == "continue" else gamma * drafted[1] + verified[1]
        return low / batch, (length * (alone[1] + each) + verified[1]) / batch


def without_method(cfg: Mapping[str, Any]) -> RunConfig:
    """The vanilla AR of a configuration, one token a pass."""
    method = {"method": "vanilla", "drafter": "none", "rule": "exact", "verification": "token"}
    kept = {name: value for name, value in cfg.items() if name not in parameters.method_parameters()}
    singly = {"iterations": None} if "iterations" in kept else {}
    return RunConfig({**kept, **method, **singly})


def drafter_alone(cfg: Mapping[str, Any]) -> RunConfig:
    """The vanilla AR of the model whose target drafts here. UsageError where none of that name is known."""
    source = registry.model_sources().get(cfg["model"])
    part = source.drafters.get("draft") if source else None
    for name, other in registry.model_sources().items():
        if part is not None and other.parts["target"] == part:
            given = [f"{key}={cfg[key]}" for key in ("batch", "engine", "dtype", "cfg_scale", "diffusion_steps")]
            return configuration.compose([f"model={name}", "method=vanilla", *given])
    raise UsageError(f"the drafter of {cfg['model']} is no model of its own")


def _token(cfg: Mapping[str, Any], planned: Mapping[str, Any], device: Device) -> Seconds:
    """Of a pass and the trajectory of its token. The host starts the pass, the engine the trajectory."""
    count, recorded = planned["launches"], cfg["engine"] != "eager"
    forward = _of_part(planned, "forward", device, count["forward"], False)
    step = _of_part(planned, "diffusion_step", device, {"step": count["diffusion_step"]}, recorded)
    steps = cfg["diffusion_steps"]
    return forward[0] + steps * step[0], forward[1] + steps * step[1]


def _of_part(
    planned: Mapping[str, Any], part: str, device: Device, launches: Mapping[str, Any], recorded: bool
) -> Seconds:
    """Of one part of a step."""
    count = sum(n for n in launches.values() if isinstance(n, int))
    rate = (device.operations or {}).get(planned["dtype"])
    done = planned["tera_operations"][part] / rate if rate else 0.0
    least = max(planned["reads_gb"][part] / device.bandwidth, done)
    low, high = (1e-6 * count * us for us in LAUNCH_US["recorded" if recorded else "started"])
    return max(least, low), least / SHARE + high


# --- tokens of a step -------------------------------------------------------------------------------------------------

#: Columns of published files that tell lines of one method apart -> the parameter.
_TOLD_BY = {name: name for name in ("delta", "nu", "k", "window", "gamma", "temperature", "top_k")} | {"lambda": "lam"}


@dataclass(frozen=True)
class TokensPerStep:
    """The least and the most that is known; where from, and the names of what that holds for: tables, or methods."""

    low: float
    high: float
    source: str = ""
    names: tuple[str, ...] = ()


def tokens_per_step(cfg: Mapping[str, Any], tokens: int, most: int, results: Path) -> TokensPerStep:
    """Of a method on a model whose images have so many `tokens`, as far as that is known before a run: what papers
    print for the method on the model, else what the embedded model's rows in the folder `results` have, else the bounds
    of the draft, with `most` tokens a step."""
    if cfg["method"] == "vanilla":
        return TokensPerStep(1, 1)
    lines = [(table, row) for table, row in _published() if (row.of, row.method_key) == (cfg["model"], cfg["method"])]
    printed = [(table, row, value) for table, row in lines if (value := _of_line(row.cells, tokens))]
    same = [one for one in printed if _is_like(one[1].cells, cfg)]
    if values := {value: table for table, _, value in same or printed}:
        return TokensPerStep(min(values), max(values), f"printed for {cfg['model']} in", tuple(values.values()))
    own = _embedded(cfg["method"], results)
    if own:
        return TokensPerStep(max(1.0, min(own)), max(own), "only the embedded model's rows have", (cfg["method"],))
    return TokensPerStep(1, most, "from one token to the whole draft, since nothing is known of", (cfg["method"],))


@cache
def _published() -> tuple[tuple[str, literature.PublishedRow], ...]:
    return tuple((table, row) for table in literature.available() for row in literature.load(table))


def _is_like(cells: Mapping[str, str], cfg: Mapping[str, Any]) -> bool:
    """Whether a printed line has the parameters of a configuration, as far as it states them."""
    for column, name in _TOLD_BY.items():
        stated = cells.get(column)
        if stated and cfg.get(name) is not None:
            with suppress(TypeError, ValueError):
                if float(stated) != float(cfg[name]):
                    return False
    return True


def _of_line(cells: Mapping[str, str], tokens: int) -> float | None:
    """Tokens a step: an accepted length, a step compression, or an image's tokens over its steps."""
    for column in ("accepted_length_mean", "speedup_step", "steps"):
        if cells[column]:
            value = float(cells[column])
            return tokens / value if column == "steps" else value
    return None


def _embedded(method: str, results: Path) -> list[float]:
    rows = rows_in(results) if results.is_dir() else []
    mine = [row for row in rows if (row.get("model"), row.get("method")) == (DEFAULT_MODEL, method)]
    return [float(row["accepted_length_mean"]) for row in mine if row.get("accepted_length_mean")]
