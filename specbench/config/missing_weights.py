"""Weights that a run needs and that are missing, and how to get them. Does not import torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from specbench.config import parameters, registry
from specbench.config.run_config import RunConfig
from specbench.errors import MissingFilesError, steps
from specbench.storage import home, sources


def check(cfg: RunConfig, with_drafter: bool = True) -> None:
    """Raises MissingFilesError if weights of the target or the drafter are missing; the message says how to get
    them."""
    if not with_drafter:
        alone = {**cfg.own, "drafter_weights": None}
        cfg = replace(cfg, drafter="none", own=alone)
    other = registry.official_target(cfg.drafter_weights or "")
    if other and not (drafting := home.model_folder(other) / "target").is_dir():
        raise MissingFilesError(f"{drafting} does not exist: {advice(other)}", bool(_published(other)))
    folder, model = registry.weights_folder(cfg), cfg.model
    if folder is None:
        return
    if model in registry.model_sources():
        if absent := registry.absent_folders(cfg):
            what = advice(model, absent, cfg.size, cfg.weights)
            published = bool(_published(model, absent, cfg.size))
            raise MissingFilesError(f"{folder} has no {', '.join(f'{part}/' for part in absent)}: {what}", published)
    elif not parameters.default("model", model, "assets"):
        if not folder.is_dir():
            put = steps(f"put the weights of {model} there", "weights=random")
            raise MissingFilesError(f"{folder} does not exist: {put}")
    else:
        target, drafter = ([path.name for path in group if not path.is_file()] for group in registry.weight_files(cfg))
        if target or drafter:
            world, network = registry.world_of(cfg), registry.drafter_network(cfg.drafter)
            ways = [f"run `make train-{world}` in a clone"]
            if not target and network and (train := registry.training(model, network.folder)):
                networks = registry.drafter_networks().items()
                here = [name for name, other in networks if other.path("embedded", world).is_file()]
                ways = [f"use a drafter that it has ({', '.join(here)})"] if here else []
                ways += [f"`{train}`, then drafter_weights=DIR with its result"]
            ways += ["weights=DIR with a folder that has them", "weights=random"]
            raise MissingFilesError(f"{folder} has no {', '.join([*target, *drafter])}: {steps(*ways)}")


def advice(model: str, absent: Sequence[str] = (), size: int | None = None, weights: str = "official") -> str:
    """How to get missing weights of a model with `files`: the next step, and alternatives. absent: the missing folders;
    default: the folders that every run needs; size, weights: the run's values."""
    entry, vectors = _entry(model, size), parameters.is_continuous("model", model)
    if not (published := _published(model, absent, size)):
        command, no_weights = registry.training(model, absent[0]), f"no weights for {absent[0]}/ are published: "
        trained = (f"run `{command}`", "drafter_weights=DIR with trained ones") if command else ("put your own there",)
        return no_weights + steps(*trained, "weights=random")
    folders = {d: f for d, f in registry.network_folders().items() if parameters.is_continuous("drafter", d) == vectors}
    drafters = [next(d for d, f in folders.items() if f == name) for name in published if name not in entry.parts]
    command = fetching(model, size if _is_other(model, size) else None, weights, drafters)
    return steps(f"run `{command}`", f"put {sources.listing(published)} by hand", "weights=random")


def _is_other(model: str, size: int | None) -> bool:
    return size not in (None, parameters.default("model", model, "size"))


def _entry(model: str, size: int | None) -> sources.ModelSource:
    entry = registry.model_sources()[model]
    return entry.of_size(str(size)) if _is_other(model, size) else entry


def _published(model: str, absent: Sequence[str] = (), size: int | None = None) -> dict[str, sources.Part]:
    """The missing folders that can be downloaded; arguments as in `advice`."""
    entry = _entry(model, size)
    return {name: part for name in absent or entry.parts if (part := sources.part_of(entry, name))}


def fetching(model: str, size: object, weights: str, drafters: Sequence[str]) -> str:
    """The command that fetches a model's files; size: None for the default size; weights: the run's value."""
    words = [f"model={model}", *([f"size={size}"] if size else [])]
    words += [f"weights={shlex.quote(weights)}"] if weights != "official" else []
    return " ".join(["specbench fetch", *words, *(f"drafter={name}" for name in drafters)])
