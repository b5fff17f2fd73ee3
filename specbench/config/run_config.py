"""The configuration of one run: composed once, checked, and immutable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from specbench.config import indices


class RunConfig(Mapping[str, Any]):
    """The checked, flat parameters of one run, in their canonical form and order. `configuration.compose` makes it.

    It is immutable: `changed` returns another one, and a list that is read from it is a copy. Configurations with equal
    parameters are equal and have the same hash.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = MappingProxyType(deepcopy(dict(values)))

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return deepcopy(value) if isinstance(value, list | dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(repr(sorted(self._values.items())))

    def __repr__(self) -> str:
        return f"RunConfig({dict(self._values)!r})"

    def __reduce__(self) -> tuple[type[RunConfig], tuple[dict[str, Any]]]:
        return RunConfig, (dict(self._values),)  # a mapping proxy cannot be pickled

    def changed(self, **values: Any) -> RunConfig:
        """A copy with other values of some parameters, which are not checked."""
        if foreign := values.keys() - self._values.keys():
            raise KeyError(f"a run has no parameter {min(foreign)}")
        return RunConfig({**self._values, **values})

    def plain(self) -> dict[str, Any]:
        """The parameters as a new dict, for YAML and JSON."""
        return deepcopy(dict(self._values))

    @property
    def n(self) -> int:
        """Prompts."""
        return int(self._values["n"])

    @property
    def images_per_prompt(self) -> int:
        """Images of each prompt."""
        return int(self._values["images_per_prompt"])

    @property
    def images(self) -> int:
        """Images of one pass over the prompts."""
        return len(indices.of_run(self))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(self._values["metrics"])

    @property
    def is_vanilla(self) -> bool:
        """Whether the run is vanilla AR: its empty draft and one token per pass identify it, not the name of the
        preset."""
        return self._values["drafter"] == "none" and not self._values.get("iterations")

    @property
    def wants_baseline(self) -> bool:
        """Whether the run decodes a baseline. Vanilla AR is its own baseline."""
        return bool(self._values.get("baseline")) and not self.is_vanilla
