"""Values of Python as arguments of the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from specbench.api.results import RunResult
from specbench.config import command_line, parameters
from specbench.errors import UsageError
from specbench.storage import home


def overrides(method: str | None, parameters: Mapping[str, Any]) -> list[str]:
    """The arguments of a configuration. A parameter that is None is one only where it has that value: `out`, the
    method and the model are left out."""
    if method is not None and "method" in parameters:
        raise UsageError("the method is given twice; give it once")
    given = parameters if method is None else {"method": method, **parameters}
    return [f"{k}={text_of(k, v)}" for k, v in given.items() if v is not None or k not in ("out", "method", "model")]


def text_of(name: str, value: Any) -> str:
    """A value in Hydra's grammar. UsageError for an object that no parameter can have."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a scalar of NumPy or PyTorch
        value = value.item()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | Path):
        text = str(value)
        plain = re.fullmatch(r"[A-Za-z_/][\w/.:@-]*", text, re.ASCII) and text.lower() not in command_line.NO_TEXT
        return text if plain else command_line.quoted(text)
    if isinstance(value, list | tuple):
        if name == "metrics" and not value:
            return "none"
        return f"[{','.join(text_of(name, one) for one in value)}]"
    declared = parameters.table().get(name)
    if isinstance(value, Mapping) and declared and declared.kind == "fields":
        return command_line.quoted(json.dumps(value))
    raise UsageError(f"{name} cannot be a {type(value).__name__}: give a number, text, True, False, None or a list")


def folder_of(given: RunResult | str | Path) -> Path:
    """The folder of a run."""
    return given.folder if isinstance(given, RunResult) else home.expanded(given)
