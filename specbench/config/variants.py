"""The variants of a method: as printed, as released, and exact where that is neither.

A variant is a bundle of settings, in the preset:

    variant: released                   the preset's own
    variants:
      printed: {nodes: 59}
      released:
        nodes: 58
        models: {lumina_mgpt: {depth: 6}}

Each setting is a flat parameter of the preset's drafter, rule or verification, and can be given alone. `models` names
the models whose settings differ. Imports neither torch nor Hydra.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from specbench.config import parameters
from specbench.errors import unknown

#: Parameters that older configurations lack, and the values of what those did. A hash leaves these values out.
ADDED: dict[str, Any] = {
    "fresh": "uniform",
    "stored": "new",
    "siblings": "stored",
    "branch": "always",
    "plain_until": 0,
    "plain_from": None,
    "tau": 0.5,
    "ranking": "full",
    "entropy_temperature": None,
    "top_n_sigma": None,
    "images_per_prompt": 1,
    "shard": None,
    "timing": None,
    "emitted_draws": 0,
    "log": "none",
    "unconditional": "header",
}


def of(method: str) -> tuple[str, ...]:
    """The variants of a method; none where it has one version alone."""
    return tuple(parameters.default("method", method, "variants") or ())


def settings(method: str, variant: str, model: str) -> dict[str, Any]:
    """Parameter -> value of a variant on a model. UsageError for an unknown variant."""
    table = parameters.default("method", method, "variants") or {}
    if str(variant) not in table:
        raise unknown(f"variant of {method}", str(variant), table)
    own = dict(table[variant])
    return own | own.pop("models", {}).get(model, {})


def resolved(cfg: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """A configuration with the settings of its variant, but for the parameters that are `given`. A part that replaces
    the preset's own keeps its parameters. UsageError for an unknown variant."""
    method = str(cfg.get("method"))
    if not of(method):
        return dict(cfg)
    found = settings(method, cfg["variant"], str(cfg.get("model")))
    return {name: found[name] if name in found and name not in given and _owned(cfg, name) else value
            for name, value in cfg.items()}  # fmt: skip


def departures(cfg: Mapping[str, Any]) -> list[str]:
    """The parameters of a configuration that differ from its variant: "window 16 (not 15)"."""
    method = cfg["method"]
    found = settings(method, cfg["variant"], cfg["model"]) if cfg.get("variant") else {}
    return [
        f"{name} {cfg[name]} (not {value})"
        for name, value in found.items()
        if _owned(cfg, name) and cfg[name] != value
    ] + [f"{part} {cfg[part]} (not {own})" for part, own in parameters.method_choices(method).items()
         if found and part in parameters.PARTS and cfg[part] != own]  # fmt: skip


def of_older(held: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration of an earlier version, with the parameters that it lacks."""
    found = dict(held)
    if found.get("rule") == "gsd" and "distance" not in found:
        found["rule"] = "neighbourhood"
    wanted = parameters.parameters_of(found)
    absent = ADDED | {"variant": parameters.default("method", str(found.get("method")), "variant")}
    return found | {name: value for name, value in absent.items() if name in wanted and name not in found}


def _owned(cfg: Mapping[str, Any], name: str) -> bool:
    """Whether a part that is the preset's own declares a parameter."""
    own = parameters.method_choices(str(cfg.get("method")))
    parts = (part for part in parameters.PARTS if cfg.get(part) == own.get(part, parameters.default_choice(part)))
    return any(name in parameters.declared(part, str(cfg[part])) for part in parts)
