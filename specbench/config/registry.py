"""The implementation and the weight files behind each name that can be chosen. A look-up imports nothing heavy.

A rule is the function `build` of specbench/decoding/rules/NAME.py, a drafter `build` of specbench/decoding/drafters/
NAME.py, a verification `build` of specbench/decoding/verify/NAME.py, a model `load` of specbench/models/NAME.py. To add
one, write the module and conf/GROUP/NAME.yaml. This file lists only names that share a module, and names that need
weights. What a plug-in provides comes from there (see `plugins`).
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from specbench.config import networks, parameters
from specbench.config.networks import ASSETS as ASSETS
from specbench.config.networks import DrafterNetwork
from specbench.errors import UsageError, unknown
from specbench.storage import home, sources
from specbench.storage.files import LARGE, cached_sha256, state


@dataclass(frozen=True)
class Entry:
    """`target` is the function that builds it ("module:name"). `assets` are the weight files that it needs in the
    weights folder, for embedded models; `parts` are the sub-folders that it reads there, for real models."""

    target: str
    assets: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


def _real(bundle: str, *parts: str) -> Entry:
    return Entry(f"specbench.models.loading.{bundle}", parts=("target", "tokenizer", *parts))


_FOLDERS = {
    "model": "specbench.models",
    "drafter": "specbench.decoding.drafters",
    "rule": "specbench.decoding.rules",
    "verification": "specbench.decoding.verify",
}

_FUNCTIONS = {"model": "load"}  # of the other kinds it is `build`

_LISTED: dict[str, dict[str, Entry]] = {
    "model": {
        "llamagen_scenes": Entry(
            "specbench.models.loading.scenes:ScenesModel",
            ("scenes_target.safetensors", "scenes_tokenizer.safetensors", "scenes_text.safetensors"),
        ),
        "mar_scenes": Entry(
            "specbench.models.loading.mar_scenes:ScenesMAR", ("scenes_mar.safetensors", "scenes_kl.safetensors")
        ),
        "llamagen_xl": _real("llamagen_official:LlamaGenModel", "text"),
        "llamagen_xl_512": _real("llamagen_official:LlamaGenModel", "text"),
        "llamagen_l": _real("llamagen_official:LlamaGenModel"),
        "llamagen_xl_c2i": _real("llamagen_official:LlamaGenModel"),
        "llamagen_3b": _real("llamagen_official:LlamaGenModel"),
        "lumina_mgpt": _real("chameleon:Chameleon"),
        "anole": _real("chameleon:Chameleon"),
        "lumina_mgpt2": _real("lumina2:Lumina2"),
        "emu3": _real("emu3:Emu3"),
        "janus_pro_1b": Entry("specbench.models.loading.janus:Janus", parts=("target",)),
        "janus_pro_7b": Entry("specbench.models.loading.janus:Janus", parts=("target",)),
        "simplear_05b": _real("simplear:SimpleAR"),
        "simplear_15b": _real("simplear:SimpleAR"),
        "mar_b": _real("mar_official:MARModel"),
        "mar_l": _real("mar_official:MARModel"),
        "mar_h": _real("mar_official:MARModel"),
    },
    "drafter": {
        "eagle_tree": Entry("specbench.decoding.drafters.eagle:build"),
        "eagle2": Entry("specbench.decoding.drafters.eagle:build"),
        "eagle3": Entry("specbench.decoding.drafters.eagle:build_eagle3"),
        "eagle3_tree": Entry("specbench.decoding.drafters.eagle:build_eagle3"),
        "eagle3_dynamic": Entry("specbench.decoding.drafters.eagle:build_eagle3"),
        "jacobi": Entry("specbench.decoding.drafters.window:build_jacobi"),
        "sjd": Entry("specbench.decoding.drafters.window:build_sjd"),
    },
    "rule": {
        "exact": Entry("specbench.decoding.rules.relaxed:build_exact"),
        "uniform": Entry("specbench.decoding.rules.relaxed:build_uniform"),
        "cool": Entry("specbench.decoding.rules.relaxed:build_cool"),
        "band": Entry("specbench.decoding.rules.band:build_band"),
        "mentored": Entry("specbench.decoding.rules.band:build_mentored"),
        "lantern": Entry("specbench.decoding.rules.lantern:build_lantern"),
        "lantern_pp": Entry("specbench.decoding.rules.lantern:build_lantern_pp"),
        "density": Entry("specbench.decoding.continuous.rule:build"),
    },
}


def entry(kind: str, name: str) -> Entry:
    """The entry of a model, drafter or rule. Raises UsageError with the valid names."""
    if name not in parameters.choices(kind):
        raise unknown(kind, name, parameters.choices(kind))
    found = _LISTED.get(kind, {}).get(name) or Entry(f"{_FOLDERS[kind]}.{name}:{_FUNCTIONS.get(kind, 'build')}")
    if kind == "drafter" and (network := drafter_network(name)):
        found = replace(found, assets=(network.asset,), parts=(network.folder,))
    return found


def drafter_network(drafter: str) -> DrafterNetwork | None:
    """The network that a drafter's file declares; None where the drafter needs none."""
    network = parameters.default("drafter", drafter, "network")
    return networks.declared(network) if network else None


def network_folders() -> dict[str, str]:
    """Every drafter that needs a network -> the folder of its weights."""
    found = {name: drafter_network(name) for name in parameters.choices("drafter")}
    return {name: network.folder for name, network in found.items() if network}


def find(kind: str, name: str) -> Any:
    """The object behind a name. UsageError where it is a plug-in's and cannot be loaded."""
    own = entry(kind, name)
    one = parameters.provided(kind, name)
    return one.load(_FUNCTIONS.get(kind, "build")) if one else pkgutil.resolve_name(own.target)


def module(kind: str, name: str) -> ModuleType:
    """The module of the object behind a name."""
    if parameters.provided(kind, name):
        return sys.modules[find(kind, name).__module__]
    return importlib.import_module(entry(kind, name).target.partition(":")[0])


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
    """The files behind a configuration's target and behind its drafter, in the order in which they are hashed.

    Raises FileNotFoundError if a folder is missing.
    """
    folder, own = weights_folder(cfg), own_drafter(cfg)
    entries = entry("model", cfg["model"]), entry("drafter", cfg["drafter"])
    target, drafter = (_files(folder, e, bool(entries[0].parts)) if folder else [] for e in entries)
    if folder and parameters.provided("model", cfg["model"]):
        target = _held(folder)
    return target, drafter_files(own) if own else drafter


def own_drafter(cfg: Mapping[str, Any]) -> Path | None:
    """The path behind drafter_weights= of a configuration, if it is given."""
    given = cfg.get("drafter_weights")
    network = drafter_network(cfg["drafter"]) if given else None
    return network.path(given) if given and network else None


def _files(folder: Path, e: Entry, real: bool) -> list[Path]:
    return [file for part in e.parts for file in _held(folder / part)] if real else [folder / name for name in e.assets]


def _held(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist")
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))


def drafter_files(path: Path) -> list[Path]:
    """The files behind drafter_weights=; of a folder that `specbench train` wrote, only the weights."""
    own = path / networks.FILE
    return [own] if own.is_file() else [path] if path.is_file() or path.parent == ASSETS else _held(path)


def check_weights(cfg: Mapping[str, Any]) -> None:
    """Raises UsageError if weights are missing; the message names the way to get them."""
    folder, model = weights_folder(cfg), cfg["model"]
    if folder is None:
        return
    if parameters.provided("model", model):
        if not folder.is_dir():
            raise UsageError(f"{folder} does not exist: put the weights of {model} there, or try weights=random")
        return
    if not entry("model", model).parts:
        files = [path for group in weight_files(cfg) for path in group]
        if absent := [path.name for path in files if not path.is_file()]:
            raise UsageError(
                f"{folder} lacks {', '.join(absent)}: run `make train-scenes`, name a folder that has them with"
                " weights=DIR, or try weights=random"
            )
        return
    drafter_folders = () if cfg.get("drafter_weights") else entry("drafter", cfg["drafter"]).parts
    needed = (*entry("model", model).parts, *drafter_folders)
    if absent := [part for part in needed if not (folder / part).is_dir()]:
        raise UsageError(f"{folder} lacks {', '.join(f'{part}/' for part in absent)}: {advice(model, absent)}")


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


def advice(model: str, absent: Sequence[str] = ()) -> str:
    """How to get missing weights of a model, in one sentence. absent: the missing folders; default: those that every
    run needs."""
    entry, vectors = sources.MODELS[model], parameters.is_continuous("model", model)
    wanted = {name: sources.part_of(entry, name) for name in absent or entry.parts}
    drafters = [name for name in wanted if name not in entry.parts]
    if unpublished := [name for name, part in wanted.items() if part is None]:
        trained = [
            name for name in networks.TRAINED if networks.NETWORKS[name].folder == unpublished[0] and not vectors
        ]
        if trained:
            return (
                f"no weights for {unpublished[0]}/ are published, train them with `specbench train drafter={trained[0]}"
                f" model={model}`, name a folder that has some with drafter_weights=DIR, or try weights=random"
            )
        return f"no weights for {unpublished[0]}/ are published, put your own there, or try weights=random"
    folders = {d: f for d, f in network_folders().items() if parameters.is_continuous("drafter", d) == vectors}
    words = "".join(f" drafter={next(d for d, folder in folders.items() if folder == n)}" for n in drafters)
    places = sources.listing({name: part for name, part in wanted.items() if part})
    return f"run `specbench fetch model={model}{words}`, put {places} by hand, or try weights=random"
