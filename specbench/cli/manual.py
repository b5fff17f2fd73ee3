"""The end of the help of `specbench run`: every parameter of the chosen model, data and method, with its value, type,
range and meaning; and the same for the arguments of `specbench train`. Does not import torch."""

from __future__ import annotations

import re
from typing import Any

from specbench.cli.arguments import CommandLine, columns
from specbench.config import parameters
from specbench.config.parameter import Parameter

#: Widths of the columns: name, value, type and range, and meaning.
_WIDTHS = (19, 16, 20, 37)
_LONG = 3 * _WIDTHS[1]  # characters; a longer value is shown in the column of the meaning

#: Parameters in the sections sampling, model and data although every run has them or a model declares them.
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "entropy_temperature",
    "top_n_sigma",
    "cfg_scale",
    "cfg_schedule",
    "iterations",
    "diffusion_steps",
    "final_noise",
)
_MODEL, _DATA = ("dtype",), ("protocol", "n", "seed")


def run(line: CommandLine) -> str:
    """Describes every parameter of a run with these arguments, which need not be valid. Raises UsageError for a
    parameter that no file declares."""
    from specbench.config import command_line, configuration

    cfg = configuration.described(command_line.read(line.others, line["--multirun"]))
    declared = parameters.in_run(cfg)
    if foreign := [name for name in cfg if name not in declared]:
        raise parameters.no_parameter(foreign[0], cfg)
    lines = [_table_head("value"), ""]
    for title, names in _sections(cfg).items():
        lines += [title, *(_described(name, declared[name], cfg[name]) for name in names), ""]
    choices = {f"{group}=": ", ".join(parameters.choices(group)) for group in parameters.groups()}
    return "\n".join([*lines, "names:", *(columns(entry, (13, 81)) for entry in choices.items())])


def training(_line: CommandLine) -> str:
    """Describes the arguments of a training: their values in a recipe, and what the other recipes change."""
    from specbench.training.recipes import TABLE, defaults

    values, changes = defaults()
    lines = [_described(name, parameter, values.get(name)) for name, parameter in TABLE.items()]
    others = [columns(entry, (_WIDTHS[0], 77)) for entry in changes]
    title = "recipes: what they set for every drafter, then for single ones:"
    return "\n".join([_table_head("default"), "", *lines, "", title, *others])


def _table_head(value: str) -> str:
    return columns(("parameter", value, "type and range", "meaning"), _WIDTHS)


def _sections(cfg: dict[str, Any]) -> dict[str, list[str]]:
    """Title -> names of parameters, with choices of a file first."""
    sections: dict[str, list[str]] = {f"{title}:": [] for title in ("method", "sampling", "model", "data", "run")}
    order = [*parameters.parameters_of(cfg), *cfg]
    for name in sorted(cfg, key=lambda name: (name not in parameters.groups(), order.index(name))):
        sections[f"{_section(name)}:"].append(name)
    return sections


def _section(name: str) -> str:
    if name in _SAMPLING:
        return "sampling"
    if name in ("method", "variant") or name in parameters.method_parameters():
        return "method"
    for group, others in (("model", _MODEL), ("data", _DATA)):
        declared = (parameters.declared(group, choice) for choice in parameters.choices(group))
        if name in others or any(name in names - parameters.common() for names in declared):
            return group
    return "run"


def _described(name: str, parameter: Parameter, value: Any) -> str:
    shown, meaning = _shown(parameter, value), parameter.line
    if len(shown) > _LONG:
        shown, meaning = "(see right)", f"{meaning}; now: {shown}"
    return columns((name, shown, _wanted(name, parameter), meaning), _WIDTHS)


def _shown(parameter: Parameter, value: Any) -> str:
    """A value in the syntax of the command line."""
    if value is None:
        return "null" if parameter.null else "(required)"
    if isinstance(value, bool):
        return str(value).lower()
    if parameter.kind == "names":
        return ", ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def _wanted(name: str, parameter: Parameter) -> str:
    """The allowed values, with their unit."""
    text = parameter.wanted().removeprefix("a ").removeprefix("an ")
    if name in parameters.groups() and not parameter.choices:
        null = f", or null ({parameter.null})" if parameter.null else ""
        text = ("names below" if name == "metrics" else "a name below") + null
    elif parameter.pattern:
        text = "text"  # its meaning describes the form
    text = re.sub(r"(?<![\d.])\d{4,15}", lambda number: f"{int(number[0]):,}", text)
    return f"{text}; {parameter.unit}" if parameter.unit else text
