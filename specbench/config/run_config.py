"""The configuration of one run: composed once, checked, and immutable."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar

from specbench.config import indices
from specbench.errors import UsageError

T = TypeVar("T")


def _read(kind: type[T], values: Mapping[str, Any]) -> T:
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names if name in values})


@dataclass(frozen=True)
class PromptSelection:
    """Which prompts: the first `n` of a data set (None: all), in the order of `seed`. own: the parameters that the data
    set declares, by name; others are ignored."""

    data: str
    n: int | None
    seed: int = 0
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def drawn(self) -> range:
        """The indices of prompts that code generates without end. UsageError without n."""
        if self.n is None:
            raise UsageError(f"data={self.data} has no last prompt: give n=NUMBER")
        return range(self.n)

    def read(self, kind: type[T]) -> T:
        """The data set's parameters as an object of a dataclass, by the names of its fields. A field that the data set
        does not declare keeps its default; TypeError if it has none."""
        return _read(kind, self.own)


@dataclass(frozen=True)
class RunConfig:
    """The checked parameters of one run, in their canonical form. `configuration.compose` makes it.

    The fields are the names of the choices, then the parameters of every run, with the units and the meaning of
    conf/config.yaml. `own` has the parameters that the choices declare, by name; `config.read(Kind)` returns some of
    them as a dataclass, and those that more than one part reads are properties.
    """

    model: str
    method: str
    drafter: str
    rule: str
    verification: str
    data: str
    engine: str
    log: str
    protocol: str | None
    seed: int
    n: int
    shard: str | None
    images_per_prompt: int
    batch: int
    device: str
    dtype: str
    metrics: tuple[str, ...]
    metrics_dir: str | None
    reference: str | None
    baseline: bool
    warmup: int
    timing: bool | None
    emitted_draws: int
    workers: int
    ray_address: str | None
    out: str | None
    own: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunConfig:
        """The configuration of flat, checked parameters. KeyError if a parameter of every run is missing."""
        common: dict[str, Any] = {name: values[name] for name in _common()} | {"metrics": tuple(values["metrics"])}
        own = {name: deepcopy(value) for name, value in values.items() if name not in common}
        return cls(**common, own=own)

    def __hash__(self) -> int:
        return hash(repr(sorted(self.plain().items())))

    def plain(self) -> dict[str, Any]:
        """The flat parameters as a new dict in their canonical order, for YAML, JSON and rows."""
        names = _common()
        first = ["model", "method", *(["variant"] if "variant" in self.own else []), *names[2:8]]
        return {name: self.get(name) for name in dict.fromkeys([*first, *self.own, *names])}

    @property
    def images(self) -> int:
        """Images of one pass over the prompts."""
        return len(indices.of_run(self))

    @property
    def is_vanilla(self) -> bool:
        """Whether the run is vanilla AR: its empty draft and one token per pass identify it, not the name of the
        preset."""
        return self.drafter == "none" and not self.own.get("iterations")

    @property
    def wants_baseline(self) -> bool:
        """Whether the run decodes a baseline. Vanilla AR is its own baseline."""
        return self.baseline and not self.is_vanilla

    @property
    def prompts(self) -> PromptSelection:
        """The prompts of the run: the first n of its data set, in the order of its seed."""
        return PromptSelection(self.data, self.n, self.seed, self.own)

    @property
    def weights(self) -> str:
        """Of the model: embedded, official, random or a folder."""
        return str(self.own["weights"])

    @property
    def temperature(self) -> float:
        """Of the target's softmax or, for continuous tokens, of its noise; 0 is greedy."""
        return float(self.own["temperature"])

    @property
    def drafter_weights(self) -> str | None:
        """Of the drafter's network; None: the default, or no network."""
        return self.own.get("drafter_weights")

    @property
    def size(self) -> int | None:
        """The side of an image in pixels, for a model that has several."""
        return self.own.get("size")

    @property
    def variant(self) -> str | None:
        """The version of the method, for a preset that has several."""
        return self.own.get("variant")

    def on_random_weights(self) -> RunConfig:
        """The same run on random weights, which needs no file of weights."""
        own = {**self.own, "weights": "random"}
        return replace(self, own=own | {"drafter_weights": None} if "drafter_weights" in own else own)

    def changed(self, **values: Any) -> RunConfig:
        """A copy with other values of some parameters, which are not checked."""
        if foreign := [name for name in values if name not in self]:
            raise KeyError(f"a run has no parameter {foreign[0]}")
        return RunConfig.of(self.plain() | values)

    def read(self, kind: type[T]) -> T:
        """Parameters of the choices as an object of a dataclass, by the names of its fields. A field that no choice of
        this run declares keeps its default; TypeError if it has none."""
        return _read(kind, self.own)

    def get(self, name: str) -> Any:
        """The value of a parameter by its name, for code that compares or prints all of them; None if this run does not
        have it."""
        if name in self.own or name not in self:
            return deepcopy(self.own.get(name))
        return list(self.metrics) if name == "metrics" else getattr(self, name)

    def __contains__(self, name: object) -> bool:
        """Whether a run has a parameter of this name."""
        return name in self.own or name in _common()


@cache
def _common() -> list[str]:
    """The parameters of every run."""
    return [f.name for f in fields(RunConfig) if f.name != "own"]
