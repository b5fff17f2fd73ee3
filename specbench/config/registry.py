"""The implementation and the weight files behind each name that can be chosen. A look-up imports nothing heavy.

A model is the function `load`, a data set `items`, a rule, a drafter and a verification `build` of the module NAME.py:
in the group's package (`plugins.IMPLEMENTED`), a plug-in's next to its NAME.yaml. The file of a choice names another
one with `implementation: MODULE:NAME` (a metric's with `metric:`), and where its weights and data come from with
`assets`, `network` and `files`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.config.yaml_files import cached
from specbench.errors import UsageError, unknown
from specbench.storage import home, sources
from specbench.storage.files import LARGE, cached_sha256, state
from specbench.storage.reading import made

#: The weights that the project carries.
ASSETS = Path(__file__).resolve().parents[1] / "assets"
#: A drafter trained here, in this project's own format, in its folder.
DRAFTER_FILE = "specbench.safetensors"


@dataclass(frozen=True)
class DrafterNetwork:
    """The network that a drafter uses, as its file declares it, `network: {folder: NAME, loader: "module:Class"}`;
    others name the drafter whose file declares it: `network: eagle`.

    folder: of its weights next to a real target's; stem: the kind in its file's metadata and name among the embedded
    weights, where that is not the folder's name; loader: a `models.loading.drafters.NetworkLoader`, where the
    target's bundle does not load the network itself; training: a `models.supervision.Training`, or of continuous
    tokens a `training.command.TrainingTask`, where `specbench train` trains it; method: the preset that uses what was
    trained; variants: names of further embedded weights, of another training or length of training. Classes are given
    as "module:name"."""

    folder: str
    loader: str = ""
    training: str = ""
    method: str = ""
    stem: str = ""
    variants: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """In the metadata of a file in this project's own format."""
        return self.stem or self.folder

    @property
    def asset(self) -> str:
        """Its file among the embedded weights."""
        return f"scenes_{self.kind}.safetensors"

    def path(self, given: str) -> Path:
        """The folder or file that drafter_weights= names: `embedded` and embedded:NAME are the project's own.
        UsageError for a NAME that does not exist."""
        if not is_embedded(given):
            return Path(given)
        name = given.partition(":")[2]
        if not name:
            return ASSETS / self.asset
        if name not in self.variants:
            if self.variants:
                raise unknown(f"{self.kind} weights", name, self.variants)
            raise UsageError(f"drafter_weights={given}: {self.kind} has no embedded weights but the default ones")
        return ASSETS / self.asset.replace(".safetensors", f"_{name}.safetensors")


def is_embedded(given: str) -> bool:
    """Whether drafter_weights= names the project's own weights."""
    return given.partition(":")[0] == "embedded"


def find(group: str, name: str) -> Any:
    """The object behind a name. UsageError for a name that does not exist, and where it is a plug-in's and cannot be
    loaded."""
    one, held = parameters.choice(group, name), parameters.content(group, name)
    named = held[name].get("metric", "") if group == "metrics" else held.get("implementation")
    return one.load(named or {"model": "load", "data": "items"}.get(group, "build"))


def module(group: str, name: str) -> ModuleType:
    """The module of the object behind a name."""
    return sys.modules[find(group, name).__module__]


def is_drawn(data: str) -> bool:
    """Whether the code makes the prompts of a data set, without end; those of the others come from files, which may
    change."""
    return parameters.default("data", data, "drawn") is True


def _declared(group: str, key: str) -> dict[str, Any]:
    """Every choice of a group whose file has a value of a key -> this value."""
    found = {name: parameters.default(group, name, key) for name in parameters.choices(group)}
    return {name: value for name, value in found.items() if value}


@cached
def drafter_networks() -> dict[str, DrafterNetwork]:
    """The networks that drafters use, by the name of the drafter whose file declares it."""
    held = _declared("drafter", "network").items()
    return {name: network(fields) for name, fields in held if isinstance(fields, Mapping)}


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
    """The network that a drafter needs; None where it needs none. UsageError for an unknown drafter."""
    parameters.choice("drafter", drafter)
    declared = parameters.default("drafter", drafter, "network")
    return network(declared) if declared else None


def network_folders() -> dict[str, str]:
    """Every drafter that needs a network -> the folder of its weights."""
    return {name: network(declared).folder for name, declared in _declared("drafter", "network").items()}


@cached
def model_sources() -> dict[str, sources.ModelSource]:
    """Every model whose file says where its weights come from -> these."""
    held = _declared("model", "files").items()
    return {name: sources.model_source(files, f"files of model {name}") for name, files in held}


@cached
def data_sources() -> dict[str, sources.Data]:
    """Every data set whose file says where its data come from -> these."""
    held = _declared("data", "files").items()
    return {name: made(sources.Data, files, f"files of data {name}") for name, files in held}


@cached
def evaluators() -> dict[str, sources.Part]:
    """Folder below the one of metrics -> what fills it. One metric declares it; others that read it name it."""
    files = {name: parameters.default("metrics", name, name).get("files") for name in parameters.single_metrics()}
    return {
        folder: made(sources.Part, fields, f"files of metric {name}")
        for name, held in files.items()
        if isinstance(held, Mapping)
        for folder, fields in held.items()
        if fields is not None
    }


def evaluator_folders(metric: str) -> list[str]:
    """The folders below the one of metrics that a metric reads, which `evaluators` fills."""
    folders = list(parameters.default("metrics", metric, metric).get("files") or ())
    if foreign := [folder for folder in folders if folder not in evaluators()]:
        raise UsageError(f"metric {metric}: no metric declares the files of the folder {foreign[0]}")
    return folders


def completed(cfg: Mapping[str, Any]) -> RunConfig:
    """A checked configuration with the full paths of its weights and, for n=all, the number of prompts that the data
    set has.

    Raises UsageError for absent weights, absent or bad files of prompts, and n=all of an endless data set.
    """
    found = {**cfg} if parameters.is_served(cfg) else {**cfg, **_paths(cfg)}
    if cfg["n"] != "all":
        return RunConfig(found)
    if is_drawn(cfg["data"]):
        raise UsageError(f"data={cfg['data']} has no last prompt, so n=all is not possible: give n=NUMBER")
    return RunConfig({**found, "n": len(find("data", cfg["data"])({**found, "n": None}))})


def _paths(cfg: Mapping[str, Any]) -> dict[str, str]:
    """The full paths of the weights of a configuration, by parameter."""
    found = {}
    own = parameters.default("model", cfg["model"], "weights")
    if cfg["weights"] not in (own, "random"):
        folder = home.expanded(cfg["weights"])
        if not folder.is_dir():
            raise UsageError(f"weights must be {own}, random or an existing folder (there is no folder '{folder}')")
        found["weights"] = str(folder)
    if (given := cfg.get("drafter_weights")) and is_embedded(given):
        own_drafter(cfg)  # or a UsageError
    elif given:
        path = home.expanded(given)
        if not path.exists():
            raise UsageError(
                f"drafter_weights: there is no folder '{path}'; train one with `specbench train drafter=...`"
            )
        found["drafter_weights"] = str(path)
    return found


def weights_folder(cfg: Mapping[str, Any]) -> Path | None:
    """The folder behind weights=embedded|official|DIR of a configuration; None for weights=random.

    A model of several sizes has a checkpoint for each: the default size in the folder NAME, others in NAME_SIZE.
    """
    weights, model = cfg["weights"], cfg["model"]
    if weights == "random":
        return None
    if weights == "embedded":
        return ASSETS
    if weights != "official":
        return Path(weights)
    size = cfg.get("size")
    return home.model_folder(model if size == parameters.default("model", model, "size") else f"{model}_{size}")


def weight_files(cfg: Mapping[str, Any]) -> tuple[list[Path], list[Path]]:
    """The files behind a configuration's target and behind its drafter, in the order in which they are hashed. A
    model that names neither its assets nor its files has all files of its folder.

    Raises FileNotFoundError if a folder is missing.
    """
    folder, own, network = weights_folder(cfg), own_drafter(cfg), drafter_network(cfg["drafter"])
    target: list[Path] = []
    drafter: list[Path] = []
    if folder:
        real = model_sources().get(cfg["model"])
        if real:
            target = [file for part in real.parts for file in _held(folder / part)]
        else:
            names = parameters.default("model", cfg["model"], "assets")
            target = [folder / name for name in names] if names else _held(folder)
        if network:
            drafter = _held(folder / network.folder) if real else [folder / network.asset]
    return target, drafter_files(own) if own else drafter


def own_drafter(cfg: Mapping[str, Any]) -> Path | None:
    """The path behind drafter_weights= of a configuration, if it is given."""
    given = cfg.get("drafter_weights")
    network = drafter_network(cfg["drafter"]) if given else None
    return network.path(given) if given and network else None


def _held(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist")
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))


def drafter_files(path: Path) -> list[Path]:
    """The files behind drafter_weights=; of a folder that `specbench train` wrote, only the weights."""
    own = path / DRAFTER_FILE
    return [own] if own.is_file() else [path] if path.is_file() or path.parent == ASSETS else _held(path)


def needed_folders(cfg: Mapping[str, Any]) -> list[str]:
    """The folders of weights that a run of a model with `files` reads."""
    real, network = model_sources().get(cfg["model"]), drafter_network(cfg["drafter"])
    return [*(real.parts if real else ()), *([network.folder] if network and not cfg.get("drafter_weights") else [])]


def digest(*paths: Path) -> str:
    """The first eight hexadecimal digits of the SHA-256 over the files, in the given order."""
    return _digest(tuple((path, state(path)) for path in paths))


@cache
def _digest(files: tuple[tuple[Path, tuple[int, ...]], ...]) -> str:
    """`digest` of files in these states; cached, because tables need the same ones hundreds of times."""
    h = hashlib.sha256()
    for path, _ in files:
        h.update(path.read_bytes() if path.stat().st_size < LARGE else bytes.fromhex(cached_sha256(path)))
    return h.hexdigest()[:8]


def weights_here(cfg: Mapping[str, Any]) -> str | None:
    """The label of the weights that a run would load; None where their files are absent, or a server has them. Loads
    nothing."""
    try:
        return None if parameters.is_served(cfg) else weights_label(cfg)
    except OSError:
        return None


def weights_label(cfg: Mapping[str, Any]) -> str:
    """The weights in a row: "random", "embedded:<digest of the target>+<digest of the drafter>", or, with a drafter
    from elsewhere, "random+<its digest>".

    Raises OSError if a file is missing.
    """
    weights = cfg["weights"]
    digests = "+".join(digest(*files) for files in weight_files(cfg) if files)
    if weights == "random":
        return f"random+{digests}" if digests else "random"
    return f"{weights if weights in ('embedded', 'official') else 'folder'}:{digests}"


def training(model: str, folder: str) -> str:
    """The command that trains the unpublished network of a model's folder; empty where no such command exists."""
    names = [name for name in trained() if drafter_networks()[name].folder == folder]
    can = names and parameters.kind("model", model) == "discrete"
    return f"specbench train drafter={names[0]} model={model}" if can else ""
