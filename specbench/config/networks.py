"""The network that a drafter uses: its weights, its loader and its training. Imports nothing heavy.

A drafter's file declares its network, `network: {folder: NAME, loader: "module:Class"}`, or names the drafter whose
file declares it: `network: eagle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
