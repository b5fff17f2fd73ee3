"""The protocols of the papers' experiments: what a run takes where its user says nothing, and what its row then tells.

A file conf/protocol/NAME.yaml holds

    name, version   the file's own name, and a number that grows with every change of what it sets
    serves          the tables and figures that were made so, by their ids
    source          the paper, and the commit of its released code
    sets            flat parameters of a run, whatever the model
    also            the experiment's other data sets, and what is different with each
    models          the models that it names, and the parameters of a run with each
    from_code       those of all these parameters that the paper leaves out and the released code shows
    notes           what is no parameter of a run: hardware, what a latency holds, the draft, ...

A value null is nowhere: neither in the paper nor in its code. The run then has its own, and its row says so. A word
that `parameters.TABLE` has for a parameter's null, such as "off", is that null. Several values of a parameter in a list
are all in the protocol; the first is taken unless the user names another. What belongs to a method (its draft, its
rule) is not set: the method's own preset has it.

Imports neither torch nor Hydra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from specbench.config import parameters
from specbench.errors import UsageError

#: What a protocol sets for its own data only.
OF_DATA = ("split", "caption", "metrics")


@dataclass(frozen=True)
class Protocol:
    """The content of a file, as the module says."""

    name: str
    version: int
    serves: Sequence[str]
    source: str
    sets: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]
    notes: Mapping[str, str | None]
    also: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    from_code: Sequence[str] = ()

    @property
    def label(self) -> str:
        """As a row names it: "coolsd_table1@1"."""
        return f"{self.name}@{self.version}"

    def values_for(self, model: str, data: str | None) -> dict[str, Any]:
        """Parameter -> what the protocol has for it in a run of this model on this data set. `data` is among them: the
        same one, or, where the protocol does not have that one, its first."""
        known = dict(self.sets)
        if data is not None and data in self.also:
            known |= {"data": data, **self.also[data]}
        elif data != known["data"] and not (known["data"] is None and model in self.models):
            known = {name: value for name, value in known.items() if name not in OF_DATA}
        return known | dict(self.models.get(model, {}))


@cache
def read(name: str) -> Protocol:
    """The protocol of one of the names in `parameters.choices("protocol")`."""
    return Protocol(**parameters.content("protocol", name))


def name_of(argument: str) -> str:
    """The name in "coolsd_table1" or "coolsd_table1@1".

    Raises UsageError where this specbench has another version of it. A name that does not exist is left to others.
    """
    name, at, version = argument.partition("@")
    if at and name in parameters.choices("protocol") and version != str(read(name).version):
        raise UsageError(
            f"protocol {name} has version {read(name).version} here, not {version}: write protocol={name}, or take a"
            " specbench of that time"
        )
    return name


def values(name: str, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameter -> value: what a protocol says for a run of a model, but for what is `given` already.

    A model that has prompts of its own (an embedded one, one of classes) and that the protocol does not name keeps
    them, and its metrics. Nothing for a name that does not exist: whoever checks the user's words complains.
    """
    if name not in parameters.choices("protocol") or model not in parameters.choices("model"):
        return {}
    protocol = read(name)
    own = "" if model in protocol.models else parameters.own_data(model)
    data = given.get("data") or own or protocol.sets["data"]
    has = parameters.common() | parameters.declared("model", model) | {"data"}
    if data in parameters.choices("data"):
        has |= parameters.declared("data", data)
    return {
        key: _options(key, value)[0]
        for key, value in protocol.values_for(model, data).items()
        if value is not None and key in has and key not in given and (key != "data" or value == data)
    }


def remarks(cfg: Mapping[str, Any]) -> list[str]:
    """What a row must tell of its run's protocol: where the run departs from it, and what it leaves open.

    cfg: the checked configuration. Nothing for a run without a protocol.
    """
    if not cfg["protocol"]:
        return []
    protocol = read(name_of(cfg["protocol"]))
    departs, open_, several, code = [], [], [], []
    for key, value in protocol.values_for(cfg["model"], cfg["data"]).items():
        if key not in cfg:
            continue
        mine = f"{key} {_shown(key, cfg[key])}"
        options = _options(key, value)
        if value is None:
            open_.append(mine)
        elif not any(_same(cfg[key], option) for option in options):
            departs.append(f"{mine} (not {' or '.join(_shown(key, option) for option in options)})")
        elif len(options) > 1:
            several.append(f"{mine} (of {', '.join(_shown(key, option) for option in options)})")
        elif key in protocol.from_code:
            code.append(mine)
    found = []
    if cfg["model"] not in protocol.models:
        others = f"{', '.join(protocol.models)}, not {cfg['model']}" if protocol.models else "no model"
        found.append(f"protocol {protocol.label} names {others}")
    for sentence, parts in (
        (f"departs from protocol {protocol.label}", departs),
        (f"not stated by protocol {protocol.label}, so the run's own", open_),
        (f"one of the values of protocol {protocol.label}", several),
        (f"by the released code of protocol {protocol.label}, not by its paper", code),
    ):
        if parts:
            found.append(f"{sentence}: {', '.join(parts)}")
    return found


def _options(name: str, value: Any) -> list[Any]:
    """The values that a protocol has for a parameter."""
    several = value if isinstance(value, list) and parameters.TABLE[name].kind != "names" else [value]
    return [None if isinstance(one, str) and one == parameters.TABLE[name].null else one for one in several]


def _same(mine: Any, option: Any) -> bool:
    return sorted(mine) == sorted(option) if isinstance(mine, list) and isinstance(option, list) else mine == option


def _shown(name: str, value: Any) -> str:
    if value is None:
        return parameters.TABLE[name].null
    if isinstance(value, list):
        return " + ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
