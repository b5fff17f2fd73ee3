"""The type, the range and the meaning of a flat parameter, and the check of a value."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from specbench.errors import UsageError, decimal, meant
from specbench.storage.reading import made, short

#: Flat parameters by name: of a command line, of a file in conf/, or of a run before it is a `RunConfig`.
Parameters = Mapping[str, Any]
Kind = Literal["integer", "integers", "number", "numbers", "string", "text", "flag", "names", "tree", "path"]

#: Keys of the files in conf/ that are not parameters of a run: Hydra's own, and keys that describe a choice.
METADATA = frozenset(
    "hydra kind world preferred network variants raster parameters drawn implementation assets shape files".split()
)

#: Bounds of counts that a run keeps in memory before its work starts. Realistic runs stay well below.
PROMPTS = 1_000_000
DRAFT = 2000  # tokens of a draft: a depth uses up to two of a step's tags of random numbers (`rng.TAGS`)
DEEP = 1000  # levels of a drafted tree, or candidates of a node
LONGEST = 10_000  # characters of an argument: Hydra's grammar needs seconds for longer ones


#: Kind -> the form of its values.
_WANTED = {
    "flag": "true or false",
    "names": "a list of names",
    "tree": "a tree's name, its children by depth such as 4-2-1 or 4, or a list of paths such as [[0],[1],[0,0]], at"
    f" most {DRAFT} of at most {DEEP} each",
}


@dataclass(frozen=True)
class Parameter:
    """One flat parameter: its type, its range and its meaning."""

    kind: Kind
    line: str
    low: float | None = None
    high: float | None = None
    above: bool = False  # `low` itself is excluded
    choices: tuple[str | int, ...] = ()
    pattern: str = ""  # a regular expression for texts of a certain form
    null: str = ""  # the meaning of null; empty: null is an error
    also: tuple[str, ...] = ()  # words that are allowed instead of a number
    count: int = 0  # for numbers: a list of exactly this length
    unit: str = ""
    # The cases in which a value has no effect: all these parameters have one of the listed values. A parameter can list
    # itself, if only some of its values have none.
    unused: tuple[Mapping[str, tuple[Any, ...]], ...] = ()

    def unused_in(self, name: str, values: Parameters) -> Mapping[str, tuple[Any, ...]]:
        """Of the first case in which parameter `name` has no effect, the other parameters; {} if it has one."""
        for case in self.unused:
            if all(values.get(other) in listed for other, listed in case.items()):
                return {other: listed for other, listed in case.items() if other != name}
        return {}

    def wanted(self) -> str:
        """The form and range of a value, as text."""
        if self.choices:
            text = "one of " + ", ".join(map(str, self.choices))
        elif self.kind == "integers":
            most = "" if self.high is None else f" and at most {self.high}"
            text = f"a list of rising integers of at least {self.low:g}{most}, such as [100,400]"
        elif self.kind in _WANTED:
            text = _WANTED[self.kind]
        elif self.kind in ("string", "text", "path"):
            text = self.line if self.pattern else f"a {self.kind}"
        else:
            several = f"a list of {self.count} numbers" if self.count else "a number"
            text = "an integer" if self.kind == "integer" else several
            if self.low is not None:
                text += f" {'above' if self.above else 'of at least'} {self.low:g}"
            if self.high is not None:  # every parameter with an upper bound has a lower one
                text += f" and at most {self.high if isinstance(self.high, int) else f'{self.high:g}'}"
            text += ", or a list of such numbers" if self.kind == "numbers" and not self.count else ""
        text += "".join(f", or {word}" for word in self.also)
        return text + (f", or null ({self.null})" if self.null else "")

    def checked(self, name: str, value: Any) -> Any:
        """The value of parameter `name` in its canonical form. Raises UsageError, which names the allowed values."""
        try:
            return self.read(value)
        except ValueError:
            got = "null" if value is None else short(value, 200)
            raise UsageError(
                f"{name} must be {self.wanted()} (got {got}){meant(value, map(str, self.choices))}"
            ) from None

    def from_text(self, name: str, text: str) -> Any:
        """The value of argument `name` in its canonical form, from its text; 1e6 and 1_000 are integers, too. Raises
        UsageError, which names the allowed values."""
        value: Any = text
        if text == "null":
            value = None
        elif self.kind == "flag":
            value = {"true": True, "false": False}.get(text, text)
        elif self.kind in ("integer", "integers", "number", "numbers") and text not in self.also:
            with suppress(ValueError):  # `checked` reports it
                digits = text.replace("_", "") if self.kind.startswith("integer") else text
                numbers = [_number(part.strip()) for part in digits.strip("[]").split(",")]
                value = numbers if self.kind.endswith("s") else numbers[0] if len(numbers) == 1 else text
                value = sorted({*numbers}) if self.kind == "integers" else value
        return self.checked(name, value)

    def allows(self, value: Any) -> bool:
        """Whether a value is allowed."""
        try:
            self.read(value)
        except ValueError:
            return False
        return True

    def read(self, value: Any) -> Any:
        """The value in its canonical form. Raises ValueError for a value that is not allowed."""
        if value is None:
            if not self.null:
                raise ValueError
            return None
        if isinstance(value, str) and value in self.also:
            return value
        if self.kind == "numbers" and isinstance(value, list | tuple):
            if any(isinstance(item, list | tuple) for item in value) or self.count not in (0, len(value)):
                raise ValueError
            return [replace(self, count=0).read(item) for item in value]
        if self.kind == "flag":
            ok = isinstance(value, bool)
        elif self.kind == "integer":
            ok = _is_integer(value) and self._in_range(value)
        elif self.kind in ("number", "numbers"):
            ok = not self.count and (_is_integer(value) or isinstance(value, float))
            ok = ok and abs(value) <= sys.float_info.max and self._in_range(value := float(value))
        elif self.kind == "names":
            ok = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
            value = list(value) if ok else value
        elif self.kind == "integers":
            ok = isinstance(value, list) and all(type(v) is int for v in value) and value == sorted(set(value))
            ok = ok and bool(value) and self._in_range(value[0]) and self._in_range(value[-1])
        elif self.kind == "tree":
            value = str(value) if _is_integer(value) and value > 0 else value  # tree=4: four children of the root
            ok = (isinstance(value, str) and bool(value)) or _is_tree(value)
        elif self.kind == "path":
            ok = (isinstance(value, str) or _is_integer(value)) and str(value) != ""
            value = str(value)  # out=1 is a folder too
        else:
            ok = isinstance(value, str) and (bool(value) or self.kind == "text")
        if (
            ok
            and (not self.choices or value in self.choices)
            and (not self.pattern or re.fullmatch(self.pattern, value))
        ):
            return value
        raise ValueError

    def _in_range(self, value: float) -> bool:
        """Whether a number is in the range."""
        above = self.low is None or value > self.low or (value == self.low and not self.above)
        return above and (self.high is None or value <= self.high)


def _number(text: str) -> float:
    """The number in a text, as an integer if it is whole."""
    number = decimal(text)
    return int(text) if text.isdecimal() else int(number) if number.is_integer() else number


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_tree(value: Any) -> bool:
    """Whether a value is a non-empty list of paths from the root, each a non-empty list of child numbers."""
    return (
        isinstance(value, list | tuple)
        and 0 < len(value) <= DRAFT
        and all(isinstance(path, list | tuple) and 0 < len(path) <= DEEP for path in value)
        and all(_is_integer(i) and 0 <= i <= DEEP for path in value for i in path)
    )


def declared(name: object, fields: Any) -> Parameter:
    """The parameter that these fields of a file declare. UsageError for a wrong declaration."""
    if not str(name).isidentifier() or not isinstance(fields, Mapping):
        raise UsageError(f"parameters: {name} needs the form NAME: {{kind: number, line: its meaning}}")
    if None in fields:
        raise UsageError(f"parameters: {name}: write the field 'null' in quotes")
    return made(Parameter, fields, f"parameters: {name}")


@dataclass(frozen=True)
class ShownColumn:
    """How tables and reports show a column that metrics fill, as declared under `columns` in the file of a metric.

    title, better (the better direction), decimals. resolution: values up to this size are rounding errors; they are
    printed as 0, and such a difference counts as zero in every test."""

    title: str
    better: Literal["higher", "lower"]
    decimals: int
    resolution: float = 0.0
