"""From the words of a command line to checked configurations.

Hydra composes; this module asks it, and says in one sentence what is wrong with the words. A grid (`-m`) is expanded
and checked here in full before its first job starts. Imports Hydra, but no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench import parameters
from specbench.errors import UsageError, unknown

VERSION_BASE = "1.3"  # of Hydra's behaviour
CONFIG = "config"


def compose(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The checked, flat configuration of one run: `compose(["method=cool_sd", "delta=1.1", "n=16"])`.

    Raises UsageError for what does not exist, does not fit or cannot be read.
    """
    with _session():
        return _compose(plain(overrides))


def grid(overrides: Sequence[str], multirun: bool) -> list[dict[str, Any]]:
    """The checked, flat configurations of a command line's jobs, in their order; one job without `multirun`.

    Raises UsageError, naming the job where there is more than one.
    """
    with _session():
        jobs = _expand(plain(overrides), multirun)
        checked = []
        for job in jobs:
            try:
                checked.append(_compose(job))
            except UsageError as e:
                raise UsageError(f"job {' '.join(job)}: {e}" if len(jobs) > 1 else str(e)) from None
        return checked


def plain(overrides: Sequence[str]) -> list[str]:
    """The overrides without the `+` and `++` that Hydra wants before new keys: a run has no new keys. What goes without
    saying is added: `prompts=FILE` chooses `data=prompts`, which has it, and a model that draws classes or vectors has
    data and a method of its own. `batch_size=` is `batch=`, as CSpD's tables call it."""
    words = [o if _is_hydras(o) else o.lstrip("+") for o in overrides]
    words = ["batch" + word.removeprefix("batch_size") if word.startswith("batch_size=") else word for word in words]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    added = {"data": "prompts"} if "prompts" in given else {}
    if "experiment" not in given:  # which chooses for itself
        added = parameters.usual(given.get("model", "")) | added
    return [*words, *(f"{key}={value}" for key, value in added.items() if key not in given)]


def from_job(cfg: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The checked, flat configuration of a job that Hydra started with these overrides."""
    given = {o.lstrip("+~").split("=", 1)[0] for o in overrides}
    return parameters.validate(parameters.settle(_container(cfg), given))


def swept(overrides: Sequence[str]) -> set[str]:
    """The keys of a command line that take several values."""
    with _session():
        return {o.key_or_group for o in _parse(overrides) if o.is_sweep_override()}


# --- how --------------------------------------------------------------------------------------------------------------


@contextmanager
def _session() -> Iterator[None]:
    """Hydra's compose API on conf/, from any working directory; its complaints become UsageErrors of one line."""
    try:
        with hydra.initialize_config_dir(str(parameters.conf_dir()), job_name="specbench", version_base=VERSION_BASE):
            yield
    except (HydraException, OmegaConfBaseException, ValueError) as e:
        raise UsageError(one_line(e)) from e


def one_line(error: BaseException) -> str:
    """The first line of an error's text."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].strip()


def _parse(overrides: Sequence[str]) -> list[Override]:
    loader = GlobalHydra.instance().config_loader()
    parsed = []
    for text in overrides:
        try:
            parsed += OverridesParser.create(config_loader=loader).parse_overrides([text])
        except HydraException:
            raise UsageError(
                f"cannot read '{text}': write name=value, and quote a value with commas or brackets: 'out=\"a, b\"'"
            ) from None
    return parsed


def _is_hydras(key: str) -> bool:
    return key.lstrip("+~").startswith(("hydra.", "hydra/"))


def _expand(overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    words = _parse(overrides)
    keys = [o.key_or_group for o in words]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"'{key}' is given {keys.count(key)} times; give it once")
    for o in words:
        _check_form(o)
        if o.is_sweep_override() and (o.key_or_group == "experiment" or _is_hydras(o.key_or_group)):
            raise UsageError(f"'{o.key_or_group}' takes one value at a time: run {o.input_line} one by one")
    chosen = [o.input_line or "" for o in words if o.key_or_group == "experiment" or _is_hydras(o.key_or_group)]
    sweeper = hydra.compose(CONFIG, chosen, return_hydra_config=True).hydra.sweeper
    # The command line wins over the experiment, as in Hydra's own sweeper.
    sweeps = {str(k): f"{k}={v}" for k, v in (sweeper.get("params") or {}).items()}
    if not multirun:
        if sweeps:
            raise UsageError(f"this experiment is a grid over {', '.join(sweeps)}: add -m")
        for o in words:
            if o.is_sweep_override():
                raise UsageError(f"'{o.input_line}' names several values: add -m to run one job for each")
        return [list(overrides)]
    lists = {o.key_or_group: _values(o) for o in _parse(list(sweeps.values()))} | {
        o.key_or_group: _values(o) for o in words
    }
    return [list(job) for job in itertools.product(*lists.values())]


def _values(o: Override) -> list[str]:
    key = o.get_key_element()
    if not o.is_sweep_override():
        return [o.input_line or f"{key}={o.get_value_element_as_str()}"]
    if not o.is_discrete_sweep():
        raise UsageError(f"'{o.input_line}' has no list of values: write {key}=a,b,c or {key}=range(start,stop,step)")
    return [f"{key}={value}" for value in o.sweep_string_iterator()]


def _check_form(o: Override) -> None:
    """Refuses what Hydra would take silently or explain in a page."""
    key = o.key_or_group
    if _is_hydras(key):
        return
    if o.is_delete():
        raise UsageError(f"'{o.input_line}': a parameter cannot be taken away, only set: {key}=value")
    if o.package is not None:
        raise UsageError(f"'{o.input_line}': parameters are flat, write {key}=value")
    if key not in parameters.groups() or o.is_sweep_override():
        return
    value = o.value()
    names = value if isinstance(value, list) and key == "metrics" else [value]
    for name in names:
        if not (name is None and key == "experiment") and name not in parameters.choices(key):
            raise unknown(
                "metric" if key == "metrics" else key, "null" if name is None else str(name), parameters.choices(key)
            )


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    words = _parse(plain(overrides))
    for o in words:
        _check_form(o)
    lines = [o.input_line or "" for o in words]
    try:
        cfg = hydra.compose(CONFIG, lines)
    except HydraException:
        chosen = [o for o in words if o.key_or_group in parameters.groups() or _is_hydras(o.key_or_group)]
        base = _container(hydra.compose(CONFIG, [o.input_line or "" for o in chosen]))
        for o in words:
            if o not in chosen and o.key_or_group not in base:
                raise parameters.no_parameter(o.key_or_group, base) from None
        raise
    return from_job(cfg, lines)


def _container(cfg: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items() if key != "hydra"}
