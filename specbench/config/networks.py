"""The networks that drafters use: the weights, the loader and the training of each. Imports nothing heavy.

A drafter's file under conf/drafter/ names its network with `network: NAME`, a key of `NETWORKS`, or declares one of its
own: `network: {folder: NAME, loader: "module:Class"}`. Several drafters may share a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import UsageError, unknown

#: The weights that the project carries.
ASSETS = Path(__file__).resolve().parents[1] / "assets"
#: A drafter trained here, in this project's own format, in its folder.
FILE = "specbench.safetensors"


@dataclass(frozen=True)
class DrafterNetwork:
    """folder: of its weights next to a real target's; stem: the kind in its file's metadata and name among the embedded
    weights, where that is not the folder's name; loader: a `models.loading.drafters.NetworkLoader`, where the
    target's bundle does not load the network itself; training: a `training.drafter.Training`, or of continuous
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


_LOADING, _TRAINING = "specbench.models.loading.drafters", "specbench.training.drafter"
NETWORKS = {
    "draft_model": DrafterNetwork("draft", f"{_LOADING}:DraftModelLoader", f"{_TRAINING}:DraftModelTraining", "sd"),
    "eagle": DrafterNetwork(
        "eagle",
        f"{_LOADING}:EagleLoader",
        f"{_TRAINING}:EagleTraining",
        "eagle1",
        variants=("steps100", "steps300", "steps1000", "guided"),
    ),
    "eagle3": DrafterNetwork("eagle3", f"{_LOADING}:Eagle3Loader", f"{_TRAINING}:EagleTraining", "eagle3"),
    "medusa": DrafterNetwork("medusa", f"{_LOADING}:MedusaLoader", f"{_TRAINING}:MedusaTraining", "medusa"),
    "cspd": DrafterNetwork(
        "draft",
        training="specbench.training.continuous:ContinuousTask",
        method="cspd",
        stem="mar_draft",
        variants=("path_kl",),
    ),
}
#: The networks that `specbench train drafter=` trains.
TRAINED = tuple(name for name, network in NETWORKS.items() if network.training)


def declared(network: str | Mapping[str, Any]) -> DrafterNetwork:
    """The network that a drafter's file declares, by name or by its fields."""
    return NETWORKS[network] if isinstance(network, str) else DrafterNetwork(**network)
