"""What runs would take on a GPU that is not here: hours as a range, and memory, from shapes alone.

A step takes at least as long as reading its bytes at the data sheet's bandwidth, as its arithmetic at the data sheet's
rate, and as starting its kernels at the lower figure of `LAUNCH_US`. At most it takes `1 / SHARE` times the first two
and, one after the other, its launches at the higher figure. `acceptance` says how many steps an image has. What comes
before and after decoding is not in it: texts, pixels, scores, and loading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.bench import plan
from specbench.bench.devices import Device
from specbench.config import configuration, parameters, registry
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.harness.method import shape_of
from specbench.tables import acceptance

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
        made = acceptance.known(cfg, planned["tokens"], shape_of(cfg).height + 1, self.results)
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
    """The vanilla AR of a configuration."""
    method = {"method": "vanilla", "drafter": "none", "rule": "exact", "verification": "token"}
    kept = {name: value for name, value in cfg.items() if name not in parameters.method_parameters()}
    return RunConfig({**kept, **method})


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
