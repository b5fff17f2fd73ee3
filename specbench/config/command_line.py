"""The arguments of a command line as text, before Hydra parses them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from specbench.config import parameters, protocols
from specbench.config.parameter import LONGEST
from specbench.errors import UsageError

_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_VALUES = re.compile(rf"(?:\A|(?<=,))(?:\s*(?:{_QUOTED.pattern})\s*(?=,|\Z)|[^,]*)", re.DOTALL)  # between commas
_FUNCTION = re.compile(r"\w+\(.*\)", re.DOTALL)  # of Hydra's grammar, such as choice(a,b)
NO_TEXT = ("true", "false", "nan", "inf", "null")  # Hydra reads these as other values


def normalized(overrides: Sequence[str], command_arguments: Collection[str] = ()) -> list[str]:
    """The overrides without the prefixes `+` and `++` (a run has no new keys) and without the version of a protocol,
    which is checked. The alias `batch_size=` becomes `batch=`, `drafter.weights=` becomes `drafter_weights=`, and
    `protocol=null`, which is the default, is dropped. command_arguments: names of arguments that the command reads
    itself."""
    arguments = []
    for argument in overrides:
        key, equals, value = argument.partition("=")
        if not is_hydras(argument):
            key = key.lstrip("+")
        alias = {"batch_size": "batch", "drafter.weights": "drafter_weights"}.get(key, key)
        key = key if alias in command_arguments else alias
        if key == "protocol":
            names = [protocols.name_of(name) for name in value.split(",")]
            if names == ["null"]:
                continue
            if "null" in names:
                raise UsageError(f"'{argument}': null means no protocol; run it separately")
            value = ",".join(names)
        arguments.append(f"{key}{equals}{value}")
    return arguments


def quoted(value: str) -> str:
    """Any text as a value in Hydra's grammar, where a backslash needs an escape only before a quote."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


def read(arguments: Sequence[str], multirun: bool = False, command_arguments: Collection[str] = ()) -> list[str]:
    """The arguments of a command line, normalized, and with their paths quoted, so that Hydra's grammar does not parse
    commas, brackets and spaces in them. (The shell has removed the user's quotes.) Quoted values stay as they are. In a
    grid, commas in a path separate values, except in out=; each value may have its own quotes.

    command_arguments: names of arguments that the command reads itself. UsageError for an argument that is too long.
    """
    result = []
    for argument in normalized(arguments, command_arguments):
        key, equals, value = argument.partition("=")
        if len(argument) > LONGEST:
            raise UsageError(
                f"the argument {key[:100]!r} has {len(argument)} characters; use at most {LONGEST}, and put longer text"
                " in a file"
            )
        if re.search(r"\d{400}", value):  # Python refuses to parse it
            raise UsageError(f"{key[:100]} has a number with hundreds of digits; use a smaller one")
        if is_path(key) and key not in command_arguments and equals:
            if multirun and (choice := re.fullmatch(r"choice\((.*)\)", value, re.DOTALL)):
                value = choice[1]  # the same list, whose values Hydra would lose the quotes of
            several = multirun and key != "out" and "," in value
            if not several:
                argument = f"{key}={_as_text(value)}"
            elif not _FUNCTION.fullmatch(value):
                argument = f"{key}={','.join(map(_as_text, _VALUES.findall(value)))}"
        result.append(argument)
    return result


def _as_text(path: str) -> str:
    """A path in Hydra's grammar; quoted if it would be read as something else. null, a quoted and an empty one stay."""
    if path.strip() in ("", "null") or _QUOTED.fullmatch(path.strip()):
        return path
    plain = re.fullmatch(r"[A-Za-z_./][\w./+-]*", path)
    return path if plain and path.isascii() and path.lower() not in NO_TEXT else quoted(path)


def is_path(key: str) -> bool:
    """Whether an argument of this key is a path."""
    parameter = parameters.table().get(key)
    return parameter is not None and parameter.kind == "path"


def is_hydras(key: str) -> bool:
    """Whether an argument, or its key, configures Hydra itself."""
    return key.lstrip("+~").startswith(("hydra.", "hydra/"))
