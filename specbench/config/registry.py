"""The implementation and the weight files of each name that can be chosen. A look-up imports nothing heavy.

A model is the function `load`, a data set `items`; a rule, a drafter and a verification are the dataclass `Choice` of
the module NAME.py: in the group's package (`plugins.IMPLEMENTED`), for a plug-in next to its NAME.yaml. The file of a
choice can name another one with `implementation: MODULE:NAME` (a metric's with `metric:`), and the sources of its
weights and data with `assets`, `network` and `files`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from specbench.config import parameters
from specbench.config.parameter import PROMPTS, Parameters
from specbench.config.run_config import RunConfig
from specbench.config.yaml_files import cached
from specbench.errors import UsageError, unknown
from specbench.storage import home, sources
from specbench.storage.files import LARGE, cached_sha256, state
from specbench.storage.reading import made

#: The weights that are part of the project.
ASSETS = Path(__file__).resolve().parents[1] / "assets"
#: The file of a drafter that was trained here, in this project's own format, in its folder.
DRAFTER_FILE = "specbench.safetensors"
#: The folder in it that says that a training began there.
TRAINING_STATE = "state"


@dataclass(frozen=True)
class DrafterNetwork:
    """The network of a drafter, as its file declares it: `network: {folder: NAME, loader: "module:Class"}`. Other files
    name the drafter whose file declares it: `network: eagle`.

    folder: name of its folder next to a real target's weights; stem: its kind in the file's metadata and its name among
    the embedded weights (default: the folder's name); loader: a `NetworkLoader`, if the
    target's bundle does not load the network itself; training: a `models.supervision.Training`, if `specbench train`
    trains it; method: the preset that uses the trained network; variants: names of further embedded weights, from
    another training or length of training. Classes are given as "module:name"."""

    folder: str
    loader: str = ""
    training: str = ""
    method: str = ""
    stem: str = ""
    variants: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind in the metadata of a file in this project's own format."""
        return self.stem or self.folder

    def asset(self, world: str) -> str:
        """The name of its file among the weights of an embedded world."""
        return f"{world}_{self.kind}.safetensors"

    def path(self, value: str, world: str = "scenes") -> Path:
        """The folder or file that drafter_weights= names. `embedded` and embedded:NAME are the project's own, for the
        target of a world; official:MODEL is the official target of another model. UsageError for a name that does not
        exist."""
        if model := official_target(value):
            return home.model_folder(model) / "target"
        if not is_embedded(value):
            return Path(value)
        name = value.partition(":")[2]
        if not name:
            return ASSETS / self.asset(world)
        if name not in self.variants:
            if self.variants:
                raise unknown(f"{self.kind} weights", name, self.variants)
            raise UsageError(f"drafter_weights={value}: {self.kind} has only the default embedded weights")
        return ASSETS / self.asset(world).replace(".safetensors", f"_{name}.safetensors")


def is_embedded(value: str) -> bool:
    """Whether drafter_weights= names the project's own weights."""
    return value.partition(":")[0] == "embedded"


def official_target(value: str) -> str:
    """MODEL in drafter_weights=official:MODEL; "" for another value. UsageError for a model without official files."""
    kind, _, model = value.partition(":")
    if kind != "official":
        return ""
    if model not in model_sources():
        raise unknown("model with official weights", model, model_sources())
    return model


def chosen(group: str, cfg: RunConfig) -> Any:
    """The drafter, rule or verification of a configuration as the dataclass that implements it, with its parameters:
    `chosen("rule", cfg).delta`. UsageError if a plug-in's is no dataclass, or has a field that its file does not
    declare."""
    name = getattr(cfg, group)
    kind = find(group, name)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise UsageError(f"{group} {name}: its implementation must be a dataclass, with its parameters as fields")
    names = [field.name for field in fields(kind)]
    if foreign := sorted(set(names) - parameters.declared(group, name)):
        raise UsageError(f"{group} {name}: {kind.__name__} has a field {foreign[0]}, which its file does not declare")
    return cfg.read(kind)


def find(group: str, name: str) -> Any:
    """The object that implements a choice. UsageError if the name does not exist, or if a plug-in's object cannot be
    loaded."""
    item, values = parameters.choice(group, name), parameters.content(group, name)
    named = values[name].get("metric", "") if group == "metrics" else values.get("implementation")
    return item.load(named or {"model": "load", "data": "items"}.get(group, "Choice"))


def module(group: str, name: str) -> ModuleType:
    """The module of the object that implements a choice."""
    return sys.modules[find(group, name).__module__]


def is_drawn(data: str) -> bool:
    """Whether code generates the prompts of a data set, without end. Other prompts come from files, which may
    change."""
    return parameters.default("data", data, "drawn") is True


def _declared(group: str, key: str) -> dict[str, Any]:
    """Choice -> its value of a key, for every choice of a group that has one."""
    values = {name: parameters.default(group, name, key) for name in parameters.choices(group)}
    return {name: value for name, value in values.items() if value}


@cached
def drafter_networks() -> dict[str, DrafterNetwork]:
    """The networks that drafters use, by the name of the drafter whose file declares it."""
    declarations = _declared("drafter", "network").items()
    return {name: network(fields) for name, fields in declarations if isinstance(fields, Mapping)}


def trained() -> tuple[str, ...]:
    """The networks that `specbench train drafter=` trains."""
    return tuple(name for name, network in drafter_networks().items() if network.training)


def network(declared: str | Mapping[str, Any]) -> DrafterNetwork:
    """The network of a drafter's file: the name of the drafter that declares it, or its fields. UsageError for another
    name, and for wrong fields."""
    if not isinstance(declared, str):
        return made(DrafterNetwork, declared, "network")
    if declared not in drafter_networks():
        raise unknown("network", declared, drafter_networks())
    return drafter_networks()[declared]


def drafter_network(drafter: str) -> DrafterNetwork | None:
    """The network that a drafter needs; None if it needs no network. UsageError for an unknown drafter."""
    parameters.choice("drafter", drafter)
    declared = parameters.default("drafter", drafter, "network")
    return network(declared) if declared else None


def network_folders() -> dict[str, str]:
    """Every drafter that needs a network -> the folder of its weights."""
    return {name: network(declared).folder for name, declared in _declared("drafter", "network").items()}


@cached
def model_sources() -> dict[str, sources.ModelSource]:
    """Model -> the sources of its weights, for every model whose file names them."""
    declarations = _declared("model", "files").items()
    return {name: sources.model_source(files, f"files of model {name}") for name, files in declarations}


@cached
def data_sources() -> dict[str, sources.Data]:
    """Data set -> the sources of its data, for every data set whose file names them."""
    declarations = _declared("data", "files").items()
    return {name: made(sources.Data, files, f"files of data {name}") for name, files in declarations}


@cached
def evaluators() -> dict[str, sources.Part]:
    """Folder inside the folder of metrics -> its files. One metric declares them; other metrics name the folder."""
    files = {name: parameters.default("metrics", name, name).get("files") for name in parameters.single_metrics()}
    return {
        folder: made(sources.Part, fields, f"files of metric {name}")
        for name, folders in files.items()
        if isinstance(folders, Mapping)
        for folder, fields in folders.items()
        if fields is not None
    }


def evaluator_folders(metric: str) -> list[str]:
    """The folders inside the folder of metrics that a metric reads; `evaluators` has their files."""
    folders = list(parameters.default("metrics", metric, metric).get("files") or ())
    if foreign := [folder for folder in folders if folder not in evaluators()]:
        raise UsageError(f"metric {metric}: no metric declares the files of the folder {foreign[0]}")
    return folders


def completed(values: Parameters) -> RunConfig:
    """The configuration of flat, checked parameters, with the full paths of its weights and, for n=all, the number of
    prompts of the data set.

    Raises UsageError for missing weights, missing or bad files of prompts, and n=all of a data set without end, or of
    one that is too large.
    """
    n = values["n"]
    config = RunConfig.of({**values, "n": 1 if n == "all" else n})
    config = config.changed(**_paths(config))
    if n != "all":
        return config
    if is_drawn(config.data):
        raise UsageError(f"data={config.data} has no last prompt, so n=all is not possible: give n=NUMBER")
    n = len(find("data", config.data)(replace(config.prompts, n=None)))
    if n * (per_prompt := config.images_per_prompt) > PROMPTS:
        raise UsageError(
            f"n=all is {n:,} prompts with {per_prompt:,} images each, but a run has at most {PROMPTS:,} images: give a"
            " smaller n=NUMBER"
        )
    return config.changed(n=n)


def _paths(cfg: RunConfig) -> dict[str, str]:
    """The full paths of the weights of a configuration, by parameter."""
    paths = {}
    default = parameters.default("model", cfg.model, "weights")
    if cfg.weights not in (default, "random"):
        folder = home.expanded(cfg.weights)
        if not folder.is_dir():
            raise UsageError(f"weights must be {default}, random or an existing folder (there is no folder '{folder}')")
        paths["weights"] = str(folder)
    if (weights := cfg.drafter_weights) and (is_embedded(weights) or official_target(weights)):
        drafter_path(cfg)  # checks the name
    elif weights:
        path = home.expanded(weights)
        if not path.exists():
            raise UsageError(
                f"drafter_weights: there is no folder '{path}'; train one with `specbench train drafter=...`"
            )
        paths["drafter_weights"] = str(path)
    return paths


def weights_folder(cfg: RunConfig) -> Path | None:
    """The folder that weights=embedded|official|DIR of a configuration names; None for weights=random.

    A model of several sizes has one checkpoint per size: the default size in the folder NAME, others in NAME_SIZE.
    """
    weights, model = cfg.weights, cfg.model
    if weights == "random":
        return None
    if weights == "embedded":
        return ASSETS
    if weights != "official":
        return Path(weights)
    size = cfg.size
    return home.model_folder(model if size == parameters.default("model", model, "size") else f"{model}_{size}")


def weight_files(cfg: RunConfig) -> tuple[list[Path], list[Path]]:
    """The files of a configuration's target and of its drafter, in the order in which they are hashed. If a model names
    neither its assets nor its files, all files of its folder are used.

    Raises FileNotFoundError if a folder is missing.
    """
    folder, path, network = weights_folder(cfg), drafter_path(cfg), drafter_network(cfg.drafter)
    target: list[Path] = []
    drafter: list[Path] = []
    if folder:
        real = model_sources().get(cfg.model)
        if real:
            target = [file for part in real.parts for file in _files_in(folder / part)]
        else:
            names = parameters.default("model", cfg.model, "assets")
            target = [folder / name for name in names] if names else _files_in(folder)
        if network:
            drafter = drafter_files(folder / network.folder) if real else [folder / network.asset(world_of(cfg))]
    return target, drafter_files(path) if path else drafter


def world_of(cfg: RunConfig) -> str:
    """The world of a configuration's model, whose embedded drafters it can use; scenes for a real model."""
    return parameters.world("model", cfg.model) or "scenes"


def drafter_path(cfg: RunConfig) -> Path | None:
    """The path that drafter_weights= of a configuration names; None if it is not set."""
    weights = cfg.drafter_weights
    network = drafter_network(cfg.drafter) if weights else None
    return network.path(weights, world_of(cfg)) if weights and network else None


def _files_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist")
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))


def drafter_files(path: Path) -> list[Path]:
    """The files that drafter_weights= names; for a folder that `specbench train` wrote, only the weights."""
    weights = path / DRAFTER_FILE
    return [weights] if weights.is_file() else [path] if path.is_file() or path.parent == ASSETS else _files_in(path)


def trained_folder(cfg: RunConfig, drafter: str) -> Path:
    """Where `specbench train` writes a drafter by default. For a target with files of its own, this is the folder in
    which every run looks; otherwise a run names it with drafter_weights=."""
    folder = weights_folder(cfg)
    if folder is None or cfg.model not in model_sources():
        return Path("drafters", cfg.model, drafter)
    return folder / network(drafter).folder


def absent_folders(cfg: RunConfig) -> list[str]:
    """The `needed_folders` that are not there, or hold a training that is not finished."""
    folder = weights_folder(cfg)
    return [name for name in needed_folders(cfg) if folder is not None and not _is_whole(folder / name)]


def _is_whole(folder: Path) -> bool:
    return folder.is_dir() and ((folder / DRAFTER_FILE).is_file() or not (folder / TRAINING_STATE).is_dir())


def needed_folders(cfg: RunConfig) -> list[str]:
    """The folders of weights that a run reads, for a model with `files`."""
    real, network = model_sources().get(cfg.model), drafter_network(cfg.drafter)
    return [*(real.parts if real else ()), *([network.folder] if network and not cfg.drafter_weights else [])]


def digest(*paths: Path) -> str:
    """The first eight hexadecimal digits of the SHA-256 over the files, in the given order."""
    return _digest(tuple((path, state(path)) for path in paths))


@cache
def _digest(files: tuple[tuple[Path, tuple[int, ...]], ...]) -> str:
    """`digest` of files in these states. Cached, because tables need the same ones hundreds of times."""
    h = hashlib.sha256()
    for path, _ in files:
        h.update(path.read_bytes() if path.stat().st_size < LARGE else bytes.fromhex(cached_sha256(path)))
    return h.hexdigest()[:8]


def weights_here(cfg: RunConfig) -> str | None:
    """The label of the weights that a run would load; None if their files are missing. Loads nothing."""
    try:
        return weights_label(cfg)
    except OSError:
        return None


def weights_label(cfg: RunConfig) -> str:
    """The weights in a row: "random", "embedded:<digest of the target>+<digest of the drafter>", or, with a drafter
    from another place, "random+<its digest>".

    Raises OSError if a file is missing.
    """
    weights = cfg.weights
    digests = "+".join(digest(*files) for files in weight_files(cfg) if files)
    if weights == "random":
        return f"random+{digests}" if digests else "random"
    return f"{weights if weights in ('embedded', 'official') else 'folder'}:{digests}"


def target_weights(label: str) -> str:
    """The part of a `weights_label` that describes the target's weights: without the drafter's digest."""
    return label.partition("+")[0]


def training(model: str, folder: str) -> str:
    """The command that trains the unpublished network of a model's folder; "" if no such command exists."""
    names = [name for name in trained() if drafter_networks()[name].folder == folder]
    can = names and parameters.kind("model", model) == "discrete"
    return f"specbench train drafter={names[0]} model={model}" if can else ""
