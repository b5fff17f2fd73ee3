"""The variants of a method: as printed, as released, and exact if neither of these is.

A variant is a bundle of settings, in the preset:

    variant: released                   the default variant
    variants:
      printed: {nodes: 59}
      released:
        nodes: 58
        models: {lumina_mgpt: {depth: 6}}

Each setting is a flat parameter of the preset's drafter, rule or verification, and can be set alone. `models` names
the models whose settings differ. Imports neither torch nor Hydra.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specbench.config import parameters
from specbench.config.parameter import Parameters
from specbench.config.run_config import RunConfig
from specbench.errors import unknown


def names(method: str) -> tuple[str, ...]:
    """The variants of a method; () if it has only one version."""
    return tuple(parameters.default("method", method, "variants") or ())


def settings(method: str, variant: str, model: str) -> dict[str, Any]:
    """Parameter -> value of a variant on a model. UsageError for an unknown variant."""
    table = parameters.default("method", method, "variants") or {}
    if str(variant) not in table:
        raise unknown(f"variant of {method}", str(variant), table)
    values = dict(table[variant])
    return values | values.pop("models", {}).get(model, {})


def resolved(cfg: Parameters, given: Collection[str]) -> dict[str, Any]:
    """A configuration with the settings of its variant, except the parameters that are `given`. A part that replaces
    the preset's part keeps its own parameters. UsageError for an unknown variant."""
    method = str(cfg.get("method"))
    if not names(method):
        return dict(cfg)
    values = settings(method, cfg["variant"], str(cfg.get("model")))
    return {name: values[name] if name in values and name not in given and _owned(cfg, name) else value
            for name, value in cfg.items()}  # fmt: skip


def departures(config: RunConfig) -> dict[str, list[Any]]:
    """The parameters of a configuration that differ from its variant, each with both values: {"window": [16, 15]}."""
    method, cfg = config.method, config.plain()
    values = settings(method, config.variant, config.model) if config.variant else {}
    parts = parameters.method_choices(method).items() if values else ()
    stated = {name: value for name, value in values.items() if _owned(cfg, name)}
    stated |= {part: preset for part, preset in parts if part in parameters.PARTS}
    return {name: [cfg[name], value] for name, value in stated.items() if cfg[name] != value}


def _owned(cfg: Parameters, name: str) -> bool:
    """Whether a parameter is declared by a part that the preset chose."""
    preset = parameters.method_choices(str(cfg.get("method")))
    parts = (part for part in parameters.PARTS if cfg.get(part) == preset.get(part, parameters.default_choice(part)))
    return any(name in parameters.declared(part, str(cfg[part])) for part in parts)
