"""The arguments of a command, declared once: its help, the reading of a command line and the shell's completion follow.

    @command("collect", {"SOURCE": Words("files and folders"), "out=FILE": Own("path", "the file", required=True)})
    def main(line: CommandLine) -> int:
        '''What help says first, with examples.'''

The form of an argument says how it is typed: `out=FILE` as name=value, `--limit N` as an option with a value,
`-m, --multirun` as a flag, and `SOURCE` stands for the words that are none of those. Importing this module imports
neither torch nor Hydra.
"""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from specbench.cli.commands import COMMANDS
from specbench.config.parameter import Kind as Kind  # of a field, for the documentation
from specbench.config.parameter import Parameter
from specbench.errors import Parser, UsageError, decimal, integer, unknown, values
from specbench.storage import home

_WIDTH = 120
Texts = Callable[[], Iterable[str]]


@dataclass(frozen=True)
class Own(Parameter):
    """An argument of a command's own. default: what it is where it is not given, as it is typed; several: it may be
    given again, and its value is a list; written: it is a file that the command will write, and must be able to;
    offers: what the shell completes it to, beside `choices`."""

    default: str | None = None
    required: bool = False
    several: bool = False
    written: bool = False
    offers: Texts = tuple


@dataclass(frozen=True)
class Words:
    """The words of a command line that are no name=value and no option, such as folders: their meaning, and how many.
    offers: what the shell completes them to; without it, file names."""

    line: str
    least: int = 0
    most: int | None = None
    offers: Texts | None = None


Arguments = Mapping[str, Own | Words]  # by form


@dataclass(frozen=True)
class CommandLine:
    """A command line that was read: words; others: arguments that are not the command's own; values of its own ones by
    name (`line["out"]`, `line["--limit"]`): the default, or None, where it is not given; given: names of those that
    are."""

    words: list[str]
    others: list[str]
    values: dict[str, Any]
    given: Collection[str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass
class Command:
    """A sub-command: takes the arguments of a command line and returns the exit code.

    run: what it does, whose docstring is the text of help; declared: its own arguments, or a function for them where
    that takes imports; others: "module:NAME" of the names of other arguments that it hands on, such as those
    of a run; tables: at the end of help, title -> "module:NAME" of names with their meanings, or of a text. NAME may be
    a function.
    """

    run: Callable[..., int]
    name: str
    declared: Arguments | Callable[[], Arguments]
    others: Sequence[str] = ()
    tables: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, arguments: Sequence[str], *more: Any) -> int:
        line = self.read(arguments)
        if line is None:
            print(self.help())
            return 0
        return self.run(line, *more)

    @cached_property
    def arguments(self) -> Arguments:
        return self.declared() if callable(self.declared) else self.declared

    @cached_property
    def own(self) -> dict[str, Own]:
        return {_key(form): one for form, one in self.arguments.items() if isinstance(one, Own)}

    @property
    def _named(self) -> list[str]:
        return [name for name in self.own if not name.startswith("-")]

    @cached_property
    def words(self) -> Words | None:
        return next((one for one in self.arguments.values() if isinstance(one, Words)), None)

    def read(self, arguments: Sequence[str]) -> CommandLine | None:
        """The command line; None where it asks for help. Raises UsageError."""
        parser = Parser(self.name, lambda: itertools.chain(self._named, *map(_resolved, self.others)))
        parser.add_argument("words", nargs="*")
        for form, one in self.arguments.items():
            if isinstance(one, Own) and form.startswith("-"):
                action = "store_true" if one.kind == "flag" else "append" if one.several else "store"
                parser.add_argument(*_options(form), dest=_key(form), action=action)
        found = vars(parser.read(arguments))
        if found.pop("help"):
            return None
        mine, words, others = self._sorted_out(found.pop("words"))
        given = {name: text for name, text in found.items() if text not in (None, False)}
        given |= values(mine, self._named, "parameter" if self.others else "argument")
        see = f"(see specbench {self.name} --help)"
        for form, one in self.arguments.items():
            if isinstance(one, Own) and one.required and _key(form) not in given:
                raise UsageError(f"give {form}, {one.line} {see}")
            if isinstance(one, Words) and not one.least <= len(words) <= (one.most or len(words)):
                raise UsageError(f"{self.name} takes {_shown(form, one)}, {one.line} (got {len(words)}) {see}")
        texts = {name: one.default for name, one in self.own.items() if one.default is not None} | given
        absent = {name: False if one.kind == "flag" else None for name, one in self.own.items()}
        read = {name: _value(name, self.own[name], text) for name, text in texts.items()}
        return CommandLine(words, others, absent | read, list(given))

    def _sorted_out(self, arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """The command's own name=value, the words, and the others."""
        names = self._named
        prefixes = tuple({name.partition(".")[0] + "." for name in names if "." in name})  # bench.steps: bench.
        found: tuple[list[str], list[str], list[str]] = [], [], []
        mine, words, others = found
        for argument in arguments:
            name, equals, _ = argument.lstrip("+").partition("=")  # Hydra's users write +out=
            if (name in names and (equals or not self.words)) or name.startswith(prefixes):
                mine.append(argument.lstrip("+"))
            elif self.words and (not equals or "/" in name or home.expanded(argument).exists()):
                words.append(argument)
            elif self.others:
                others.append(argument)
            else:
                raise unknown("file or argument" if self.words else "argument", name, self.own or ["--help"])
        return found

    def help(self) -> str:
        """How it is called, the text of its function, its arguments with their defaults, and its tables."""
        usage = [f"usage: specbench {self.name}"]
        usage += [_shown(form, one) for form, one in self.arguments.items() if not _is_value(form, one)]
        if self.others or any(_is_value(form, one) for form, one in self.arguments.items()):
            usage.append("[name=value ...]")
        text = " ".join(part.replace(" ", "\0") for part in usage)
        text = textwrap.fill(text, _WIDTH, subsequent_indent=" " * 9).replace("\0", " ")
        title = f"specbench {self.name}: {COMMANDS[self.name.partition(' ')[0]]}"
        lines = [title, "", text, "", inspect.cleandoc(self.run.__doc__ or "")]
        found = {"": self.arguments, **{title: _resolved(where) for title, where in self.tables.items()}}
        for title, table in found.items():
            meanings = {} if isinstance(table, str) else {name: _meaning(one) for name, one in table.items()}
            width = max(map(len, meanings), default=0)
            lines += ["", *([title] if title else []), *([table] if isinstance(table, str) else [])]
            lines += [columns(entry, (width, _WIDTH - width - 4)) for entry in meanings.items()]
        return "\n".join(lines)

    def offered(self, last: str) -> list[str]:
        """What completes the last, perhaps empty, word of a command line; file names are the shell's."""
        found: list[str] = []
        if self.words and self.words.offers is None and not last:
            return found
        for form, one in self.arguments.items():
            if isinstance(one, Words):
                found += one.offers() if one.offers else ()
            elif form.startswith("-"):
                found.append(_key(form))
            else:
                found += [f"{_key(form)}={choice}" for choice in [*one.choices, *one.offers()] or [""]]
        return [one for one in found if one.startswith(last)]


def command(
    name: str, declared: Arguments | Callable[[], Arguments], **more: Any
) -> Callable[[Callable[..., int]], Command]:
    """Makes a function of a `CommandLine` the command `name`; more: see `Command`."""
    return lambda run: Command(run, name, declared, **more)


def _resolved(where: str) -> Any:
    """What "module:NAME" names, or what that gives if it is a function."""
    found = pkgutil.resolve_name(where)
    return found() if callable(found) else found


def _options(form: str) -> list[str]:
    return [word.rstrip(",") for word in form.split() if word.startswith("-")]


def _key(form: str) -> str:
    return _options(form)[-1] if form.startswith("-") else form.partition("=")[0]


def _is_value(form: str, one: Own | Words) -> bool:
    """Whether it is a name=value that may be left out."""
    return isinstance(one, Own) and not form.startswith("-") and not one.required


def _shown(form: str, one: Own | Words) -> str:
    """An argument in the line of usage."""
    if isinstance(one, Own):
        return form if one.required else f"[{form.split(', ')[0]}]"
    several = " ..." if one.most is None else ""
    return f"{form}{several}" if one.least else f"[{form}{several}]"


def _meaning(one: Parameter | Words | str) -> str:
    if not isinstance(one, Own):
        return one if isinstance(one, str) else one.line
    choices = f": {', '.join(one.choices)}" if one.choices else ""
    default = f" (default: {one.default})" if one.default else ""
    return f"{one.line}{choices}{default}"


def columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One row of a table, over as many lines as its longest cell needs."""
    texts = (" ".join(cell.split()) for cell in cells)
    wrapped = [textwrap.wrap(text, width, break_on_hyphens=False) for text, width in zip(texts, widths)]
    rows = itertools.zip_longest(*wrapped, fillvalue="")
    return "\n".join("".join(f"  {one:<{width}}" for one, width in zip(row, widths)).rstrip() for row in rows)


def _value(name: str, one: Own, text: Any) -> Any:
    """An argument's value from its text. Raises UsageError for one that is not allowed."""
    if isinstance(text, list):
        return [_value(name, one, each) for each in text]
    if one.kind in ("integer", "integers"):
        parts = [text] if one.kind == "integer" else text.strip("[]").split(",")
        found = {integer(name, part, int(one.low or 0), int(one.high or 2**53)) for part in parts}
        return sorted(found) if one.kind == "integers" else found.pop()
    value: Any = text
    if one.kind == "flag":
        value = {"true": True, "false": False}.get(text, text)  # True itself of an option
    elif one.kind in ("number", "numbers") and text not in one.also:
        with suppress(ValueError):  # which the check tells
            numbers = [decimal(part) for part in text.split(",")]
            value = numbers if one.kind == "numbers" else numbers[0] if len(numbers) == 1 else text
    value = one.checked(name, value)
    if one.written:
        from specbench.storage.files import writable

        return writable(value)
    return home.expanded(value) if one.kind == "path" else value
