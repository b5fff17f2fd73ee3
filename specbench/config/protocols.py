"""The protocols of the papers' experiments: defaults of a run. `rows.remarks` has the remarks in its row.

A file conf/protocol/NAME.yaml has these keys:

    name, version   the file's name, and a number that grows with every change of a value
    serves          ids of the paper's tables and figures that were made with this protocol
    source          the paper, and the commit of its released code
    sets            flat parameters of a run of any model
    also            other data sets of the experiment, and the parameters that differ with each
    models          the models of the experiment, and the parameters of a run of each
    timed           the number of prompts whose seconds the paper measured, if it differs from n
    variant         method -> the variant that the paper measured, if known
    from_code       the parameters that only the released code states, not the paper
    notes           everything that is not a parameter of a run: hardware, parts of a latency, the draft, ...

The value null means that neither the paper nor its code states the parameter. The run then keeps its default, and the
row reports this. The text that the declaration gives for a parameter's null, such as "off", is that null. If a
parameter has a list of values, the protocol includes all of them, and the first one is the default. Protocols do not
set the draft and the rule: the preset of the method does, in the variant that the protocol chooses. A run also has the
kernel distance beside a protocol's Fréchet distance.

Imports neither torch nor Hydra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.config import parameters
from specbench.config.parameter import Parameters
from specbench.config.yaml_files import cached
from specbench.errors import UsageError
from specbench.storage.reading import made

#: Parameters that a protocol sets for its own data only.
OF_DATA = ("split", "caption", "metrics")


@dataclass(frozen=True)
class Protocol:
    """The content of a file (see the module's docstring)."""

    name: str
    version: int
    serves: Sequence[str]
    source: str
    sets: Parameters
    models: Mapping[str, Parameters]
    notes: Mapping[str, str | None]
    also: Mapping[str, Parameters] = field(default_factory=dict)
    from_code: Sequence[str] = ()
    variant: Mapping[str, str] = field(default_factory=dict)
    timed: int | None = None

    @property
    def label(self) -> str:
        """The name in a row: "coolsd_table1@1"."""
        return f"{self.name}@{self.version}"

    def values_for(self, model: str, data: str | None) -> dict[str, Any]:
        """Parameter -> the protocol's value in a run of this model on this data set. `data` is included: the given
        value, or the protocol's first one if the protocol does not have it."""
        known = dict(self.sets)
        if data is not None and data in self.also:
            known |= {"data": data, **self.also[data]}
        elif data != known["data"] and not (known["data"] is None and model in self.models):
            known = {name: value for name, value in known.items() if name not in OF_DATA}
        return known | dict(self.models.get(model, {}))


@cached
def read(name: str) -> Protocol:
    """The protocol of a name in `parameters.choices("protocol")`."""
    return made(Protocol, parameters.content("protocol", name), f"protocol {name}")


def name_of(argument: str) -> str:
    """The name in "coolsd_table1" or "coolsd_table1@1".

    Raises UsageError for another version. Does not check that the name exists.
    """
    name, at, version = argument.partition("@")
    if at and name in parameters.choices("protocol") and version != str(read(name).version):
        raise UsageError(
            f"protocol {name} has version {read(name).version} here, not {version}: write protocol={name}, or take a"
            " specbench of that time"
        )
    return name


def values(name: str, model: str, given: Parameters) -> dict[str, Any]:
    """Parameter -> value of a protocol for a run of a model, without the `given` parameters.

    If the protocol does not name the model and the model needs its own prompts (an embedded model, or one of classes),
    the model keeps these prompts and their metrics. {} for a name that does not exist; the check of the arguments
    reports it.
    """
    if name not in parameters.choices("protocol") or model not in parameters.choices("model"):
        return {}
    protocol = read(name)
    preferred = parameters.preferred("model", model).get("data")
    data = given.get("data") or (model not in protocol.models and preferred) or protocol.sets["data"]
    has = parameters.common() | parameters.declared("model", model) | {"data"}
    if data in parameters.choices("data"):
        has |= parameters.declared("data", data)
    result = {
        key: options(key, value)[0]
        for key, value in protocol.values_for(model, data).items()
        if value is not None and key in has and key not in given and (key != "data" or value == data)
    }
    if "metrics" in result and parameters.default("data", data, "files"):  # real images can be fetched
        result["metrics"] = _with_kid(result["metrics"])
    variant = protocol.variant.get(str(given.get("method", parameters.default_choice("method"))))
    return result if variant is None or "variant" in given else {**result, "variant": variant}


def _with_kid(metrics: Sequence[str]) -> list[str]:
    """Metrics, with the kernel distance of the same resize beside each Fréchet distance, because it is unbiased."""
    beside = (f"kid{name.removeprefix('fid')}" for name in metrics if name.startswith("fid"))
    return list(dict.fromkeys([*metrics, *(name for name in beside if name in parameters.choices("metrics"))]))


def options(name: str, value: Any) -> list[Any]:
    """The values that a protocol has for a parameter."""
    declared = parameters.table()[name]
    several = value if isinstance(value, list) and declared.kind != "names" else [value]
    return [None if isinstance(item, str) and item == declared.null else item for item in several]
