"""The files that tables and suites are written in: conf/suite/NAME.yaml, a plug-in's, or a user's. What they hold:
`reading`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from specbench.config import parameters
from specbench.errors import UsageError, plain, unknown
from specbench.tables.definitions import DEFAULT_MODEL

GROUP = "suite"
#: The keys of a file, with their meanings. Those of `specbench suite` alone are below.
KEYS = {
    "defaults": "other suites whose keys hold where this file has none of its own",
    "name": "what the suite is called (default: as its file)",
    "title": "what stands above the table",
    "paper": "where it was printed, or whose comparison it is",
    "model": f"the model of `specbench tables` (default: {DEFAULT_MODEL})",
    "n": "prompts per run (default: 16)",
    "with": "parameters of all runs",
    "columns": "what the table shows: columns of a row, each by its name, or with what is shown otherwise",
    "lines": "the methods: a label and parameters each",
    "panels": "groups of lines, each with parameters of its own: the rows of a figure's axes",
    "figure": "what is drawn: x and y of curves, or series, maps, stack",
    "matched": "columns of which every pair of curves is compared at equal x, printed instead of the lines",
    "tests": "pairs of lines that are tested image by image",
    "remarks": "sentences below the table",
    "needs": "columns without which an older row is measured again",
    "rows_of": "the command whose rows it shows: run, bench or probe",
    "on_request": "true: drawn only when it is named",
    "models": "of a suite: the models, by name or as label: parameters",
    "prompts": "of a suite: the sets of prompts, by name or as label: parameters",
    "seeds": "of a suite: the seeds, whose rows are pooled",
    "metrics": "of a suite: what scores the images",
    "batch": "of a suite: images decoded together where seconds are not measured (default: 16)",
    "timed": "of a suite: prompts of the timed runs, one image at a time next to vanilla AR; 0: none",
    "baseline": "of a suite: parameters of the reference (default: method: vanilla)",
}


@dataclass(frozen=True)
class Source:
    """A file as text for messages, and its content."""

    name: str
    held: Mapping[str, Any]

    def fault(self, text: str) -> UsageError:
        return UsageError(f"{self.name}: {text}")

    def mapping(self, key: str, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fault(f"{key} must be a mapping of names to values (got {short(value)})")
        return {str(name): one for name, one in value.items()}

    def sequence(self, key: str, value: Any) -> list[Any]:
        if value is None:
            return []
        if isinstance(value, dict):
            raise self.fault(f"{key} must be a list (got {short(value)})")
        return value if isinstance(value, list) else [value]

    def text(self, key: str, value: Any) -> str:
        """In one line, without what a terminal would obey."""
        if isinstance(value, dict | list) or value is None:
            raise self.fault(f"{key} must be a text (got {short(value)})")
        return plain(" ".join(str(value).splitlines()))

    def integer(self, key: str, value: Any, least: int = 1) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.fault(f"{key} must be an integer of at least {least} (got {short(value)})")
        return value

    def entries(self, key: str, kinds: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """Label -> parameters, of a mapping of such, a list of names, or one name; a name is a value of the parameter
        `kinds[0]`."""
        value = self.held.get(key)
        if isinstance(value, dict):
            found = {}
            for label, one in self.mapping(key, value).items():
                given = one if isinstance(one, dict) else {kinds[0]: label if one is None else one}
                found[label] = self.mapping(f"{key}: {label}", given)
            return found
        return {self.text(key, one): {kinds[0]: one} for one in self.sequence(key, value)}


def short(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return plain(text if len(text) <= 60 else f"{text[:60]}...")


def names() -> list[str]:
    """The suites that are shipped, or that a plug-in brings."""
    return list(parameters.choices(GROUP))


def named(name: str) -> Source:
    """A shipped suite. UsageError for an unknown name."""
    return _complete(_shipped(name))


def _shipped(name: str) -> Source:
    if name not in parameters.choices(GROUP):
        raise unknown("suite", plain(name), parameters.choices(GROUP))
    return Source(f"suite {name}", _read(parameters.file_of(GROUP, name)))


def of_file(path: Path) -> Source:
    """A user's file. UsageError where it cannot be read."""
    return _complete(Source(str(path), _read(path)))


#: Characters of a file, and values in it: with aliases even a short one can expand to any size.
_LARGEST, _VALUES = 1_000_000, 100_000


@cache
def _loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former is ten times as fast


def _check_size(held: Any, path: Path) -> None:
    waiting, count = [held], 0
    while waiting:
        one = waiting.pop()
        count += 1
        if count + len(waiting) > _VALUES:
            raise UsageError(f"{path} is too large for a suite")
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            waiting += one


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > _LARGEST:
            raise UsageError(f"{path} is too large for a suite")
        held = yaml.load(text, Loader=_loader())  # noqa: S506 - a safe loader
        _check_size(held, path)
    except OSError as e:
        raise UsageError(f"cannot read {path} ({e.strerror})") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise UsageError(f"cannot read {path}: {' '.join(str(e).split())}") from None
    if not isinstance(held, dict) or not held:
        raise UsageError(f"{path} is not a suite: it needs lines, and may have {', '.join(KEYS)}")
    return {str(key): value for key, value in held.items()}


def _complete(source: Source, seen: tuple[str, ...] = ()) -> Source:
    """With the keys of the suites that it names under `defaults`."""
    held: dict[str, Any] = {}
    for other in source.sequence("defaults", source.held.get("defaults")):
        name = source.text("defaults", other)
        if name in seen:
            raise source.fault(f"defaults name {name} in a circle")
        held |= _complete(_shipped(name), (*seen, name)).held
    held |= {key: value for key, value in source.held.items() if key != "defaults"}
    for key in held:
        if key not in KEYS:
            raise source.fault(f"unknown key '{plain(key)}' (choose from: {', '.join(KEYS)})")
    return Source(source.name, held)
