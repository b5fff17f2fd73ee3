"""The arguments of a command, declared once: its help, the reading of a command line and the shell's completion follow.

    @command("collect", {"SOURCE": Words("files and folders"), "out=FILE": Own("path", "the file", required=True)})
    def main(line: CommandLine) -> int:
        '''What help says first, with examples.'''

The form of an argument says how it is typed: `out=FILE` as name=value, `--limit N` as an option with a value,
`-m, --multirun` as a flag, and `SOURCE` stands for the words that are none of those. Importing this module imports
neither torch nor Hydra.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import pkgutil
import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from specbench.cli.commands import COMMANDS
from specbench.config.parameter import Kind as Kind  # of a field, for the documentation
from specbench.config.parameter import Parameter
from specbench.errors import UsageError, nearest, unknown, values
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
    are. Where it asks for help, only `others` and options are read, and nothing is checked."""

    words: list[str]
    others: list[str]
    values: dict[str, Any]
    given: Collection[str] = ()
    asks_for_help: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass
class Command:
    """A sub-command: takes the arguments of a command line and returns the exit code.

    run: what it does, whose docstring is the text of help; declared: its own arguments, or a function for them where
    that takes imports; others: "module:NAME" of the names of other arguments that it hands on, such as those
    of a run; tables: at the end of help, title -> "module:NAME" of names with their meanings; NAME may be a function;
    manual: "module:function" of the text after them, which depends on the command line.
    """

    run: Callable[..., int]
    name: str
    declared: Arguments | Callable[[], Arguments]
    others: Sequence[str] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    manual: str = ""

    def __call__(self, arguments: Sequence[str], *more: Any) -> int:
        line = self.read(arguments)
        if line.asks_for_help:
            print(self.help(line))
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

    def read(self, arguments: Sequence[str]) -> CommandLine:
        """The command line. Raises UsageError."""
        parser = Parser(self.name, lambda: itertools.chain(self._named, *map(_resolved, self.others)))
        parser.add_argument("words", nargs="*")
        for form, one in self.arguments.items():
            if isinstance(one, Own) and form.startswith("-"):
                more: dict[str, Any] = {"action": "append"} if one.several else {}
                more = {"action": "store_true"} if one.kind == "flag" else more
                more = {"nargs": "?", "const": one.choices[0]} if form.endswith("]") else more
                parser.add_argument(*_options(form), dest=_key(form), **more)
        found = vars(parser.read(arguments))
        words = found.pop("words")
        if found.pop("help"):
            others = [word for word in words if word.lstrip("+").partition("=")[0] not in self._named]
            return CommandLine([], others, found, asks_for_help=True)
        mine, words, others = self._sorted_out(words)
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

    def help(self, line: CommandLine) -> str:
        """How it is called, the text of its function, its arguments with their defaults, its tables and its manual."""
        usage = [f"usage: specbench {self.name}"]
        usage += [_shown(form, one) for form, one in self.arguments.items() if not _is_value(form, one)]
        if self.others or any(_is_value(form, one) for form, one in self.arguments.items()):
            usage.append("[name=value ...]")
        text = " ".join(part.replace(" ", "\0") for part in usage)
        text = textwrap.fill(text, _WIDTH, subsequent_indent=" " * 9).replace("\0", " ")
        title = f"specbench {self.name}: {COMMANDS[self.name][1]}"
        lines = [title, "", text, "", inspect.cleandoc(self.run.__doc__ or "")]
        found = {"": self.arguments} if self.arguments else {}
        found |= {title: _resolved(where) for title, where in self.tables.items()}
        for title, table in found.items():
            width = max(map(len, table), default=0)
            lines += ["", *([title] if title else [])]
            lines += [columns((name, _meaning(one)), (width, _WIDTH - width - 4)) for name, one in table.items()]
        if self.manual:
            lines += ["", pkgutil.resolve_name(self.manual)(line)]
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
        return one if isinstance(one, str) else " ".join(one.line.split())
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
    value: Any = text if text is True else one.from_text(name, text)
    if one.written:
        from specbench.storage.files import writable

        return writable(value)
    return home.expanded(value) if one.kind == "path" else value


class Parser(argparse.ArgumentParser):
    """The options of a sub-command, -h among them. It reports a wrong argument in one sentence, as a UsageError.

    names: of the arguments that are name=value; asked for only where an option is unknown."""

    def __init__(self, command: str, names: Callable[[], Iterable[str]]) -> None:
        super().__init__(prog=f"specbench {command}", add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", action="store_true")
        self._names = names

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options and words of a command line. UsageError for an unknown option, with the right form where it is an
        argument in the spelling of other tools: `--limit 16`, which is n=16."""
        found, rest = self.parse_known_intermixed_args(list(arguments))
        odd = [i for i, argument in enumerate(arguments) if argument in rest and argument.startswith("-")]
        right = [self._right(arguments[i], *arguments[i + 1 : i + 2]) for i in odd]
        if odd and all(right):
            self.error(f"write {' '.join(filter(None, right))} instead of {' '.join(arguments[i] for i in odd)}")
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def _right(self, option: str, following: str = "-") -> str | None:
        """An unknown option, such as --method=sjd, or --method before the argument that is its value, in the right
        form; None where it has no likely one."""
        name, equals, value = option.partition("=")
        actions, names = self._option_string_actions, list(self._names())
        is_value = not re.match(r"-\D|-$", following) and following.partition("=")[0] not in names
        value = value if equals else following if is_value else ""
        meant = nearest(name, [*names, *actions])
        if meant is None or meant not in actions:
            return meant and f"{meant}={shlex.quote(value) if value else '...'}"
        return meant if actions[meant].nargs == 0 else f"{meant} {shlex.quote(value) if value else '...'}"
