"""The text of `specbench run --help`: every parameter of the chosen model, data and method, with its value. Imports no
torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from specbench.config import parameters
from specbench.config.parameter import Parameter

WIDTH = 100
#: Widths of the columns name, value, and type with range; the meaning takes the rest.
_NAME, _VALUE, _RANGE, _GAP = 19, 16, 20, 2
_MEANING = WIDTH - _NAME - _VALUE - _RANGE - 4 * _GAP
_LONG = 3 * _VALUE  # characters; a longer value is shown with the meaning

_HEAD = """\
specbench run: decode prompts, score the images, time them against vanilla decoding, write one row

usage: specbench run [-m] [name=value ...]

  specbench run method=cool_sd delta=1.1 n=16 out=first
  specbench run method=sd rule=cool delta=2                            any drafter with any rule
  specbench run prompts=my.txt                                         every line of a file
  specbench run -m method=cool_sd delta=1.1,2 nu=0.5,0.7 out=grid      a job for each combination
  specbench run -m experiment=coolsd_delta                             a grid from conf/experiment
  specbench run protocol=coolsd_table1 model=llamagen_xl method=cool_sd delta=1.1
                                                                       after specbench fetch

out=DIR chooses the run's folder (otherwise runs/<date>/<time>-<id>/). The same command with the
same out= continues a run that was stopped.
"""
_FOOT = """\
The parameters depend on the choices, for example: specbench run method=sjd_pac model=emu3 --help

  specbench run engine=http --help    images of a server (vLLM-Omni, SGLang): its parameters

  specbench list methods       one line for each choice, and whether its weights are here
  specbench run --dry-run      what would be decoded, what is there, time, disk, memory, downloads
  specbench run --cfg job      the configuration that a run would use
  specbench run --hydra-help   Hydra's own arguments: launchers and sweepers of grids, logging
"""

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


def run(cfg: Mapping[str, Any]) -> str:
    """The help of a run with these parameters, which need not be valid. Raises UsageError for one that no file
    declares."""
    own = parameters.in_run(cfg)
    if foreign := [name for name in cfg if name not in own]:
        raise parameters.no_parameter(foreign[0], cfg)
    lines = [_line("parameter", "value", "type and range", "meaning"), ""]
    for title, names in _sections(cfg).items():
        lines += [title, *(_described(name, own[name], cfg[name]) for name in names), ""]
    return "\n".join([_HEAD, *lines, _choices(), _FOOT])


def _sections(cfg: Mapping[str, Any]) -> dict[str, list[str]]:
    """Title -> names of parameters, the choice of a file first."""
    titles = ("server", "data", "run") if parameters.is_served(cfg) else ("method", "sampling", "model", "data", "run")
    found: dict[str, list[str]] = {f"{title}:": [] for title in titles}
    order = list(parameters.table())
    for name in sorted(cfg, key=lambda name: (name not in parameters.groups(), order.index(name))):
        if titles[0] == "method":
            found[f"{_section(name)}:"].append(name)
        elif name not in parameters.SERVED:
            own = "server" if name in parameters.declared("engine", cfg["engine"]) else _section(name)
            found[f"{own}:"].append(name)
    return found


def _section(name: str) -> str:
    if name in _SAMPLING:
        return "sampling"
    if name == "method" or name in parameters.method_parameters():
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
    return _line(name, shown, _range(name, parameter), meaning)


def _shown(parameter: Parameter, value: Any) -> str:
    """A value in the syntax of the command line."""
    if value is None:
        return "null" if parameter.null else "(required)"
    if isinstance(value, bool):
        return str(value).lower()
    if parameter.kind == "names":
        return ", ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def _end(high: float) -> str:
    """An upper bound: 1,000,000, or 2**63 - 1 for numbers that are hard to read."""
    if not isinstance(high, int):
        return f"{high:g}"
    return f"2**{(high + 1).bit_length() - 1} - 1" if high > 2**40 and not high & (high + 1) else f"{high:,}"


def _range(name: str, parameter: Parameter) -> str:
    """The allowed values, with their unit."""
    if name in parameters.groups():
        text = "names below" if name == "metrics" else "a name below"
    elif parameter.choices:
        text = ", ".join(parameter.choices)
    else:
        kinds = {
            "integer": "integer",
            "numbers": "number or list",
            "flag": "true, false",
            "names": "names",
            "tree": "a name, or paths",
            "string": "text",
        }
        text = kinds.get(parameter.kind, parameter.kind)
        if parameter.low is not None and parameter.high is not None and not parameter.above:
            text += f" {parameter.low:g} to {_end(parameter.high)}"
        elif parameter.low is not None:
            text += f" {'>' if parameter.above else '>='} {parameter.low:g}"
            text += f", <= {parameter.high:g}" if parameter.high is not None else ""
    if parameter.unit:
        text += f", {parameter.unit}"
    text += "".join(f"; {word}" for word in parameter.also)
    return text + (f"; null: {parameter.null}" if parameter.null else "")


def _line(*cells: str) -> str:
    """One row of the table, over as many lines as its longest cell needs."""
    widths = (_NAME, _VALUE, _RANGE, _MEANING)
    wrapped = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    rows = []
    for i in range(max(map(len, wrapped))):
        parts = (f"{cell[i] if i < len(cell) else '':<{width}}" for cell, width in zip(wrapped, widths, strict=True))
        rows.append(" " * _GAP + (" " * _GAP).join(parts).rstrip())
    return "\n".join(rows)


def _wrapped(text: str, width: int) -> Sequence[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _choices() -> str:
    """The names behind every choice of a file."""
    lines = []
    for group in parameters.groups():
        names = ", ".join(parameters.choices(group))
        lines.append(textwrap.fill(f"{group + '=':<12}{names}", WIDTH, initial_indent="  ", subsequent_indent=" " * 14))
    return "names:\n" + "\n".join(lines) + "\n"
