"""The arguments of a command, declared once. The help, the parser and the shell's completion use the declaration.

    @command("collect", {"SOURCE": Words("files and folders"), "out=FILE": Argument("path", "the file", required=True)})
    def main(line: CommandLine) -> int:
        '''The first part of the help, with examples.'''

The form of an argument shows how it is typed: `out=FILE` as name=value, `--limit N` as an option with a value,
`-m, --multirun` as a flag; `SOURCE` is the name of the remaining words. Importing this module imports neither torch nor
Hydra.
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
class Argument(Parameter):
    """An argument of a command. default: its value if it is not given, as it is typed; several: it may be repeated, and
    its value is a list; written: a file that the command will write, and must be able to write; offers: completions in
    the shell, besides `choices`."""

    default: str | None = None
    required: bool = False
    several: bool = False
    written: bool = False
    offers: Texts = tuple


@dataclass(frozen=True)
class Words:
    """The words of a command line that are neither name=value nor an option, such as folders: their meaning and number.
    offers: completions in the shell; default: file names."""

    line: str
    least: int = 0
    most: int | None = None
    offers: Texts | None = None


Arguments = Mapping[str, Argument | Words]  # by form


@dataclass(frozen=True)
class CommandLine:
    """A command line after parsing: words; others: arguments that the command hands on; values of its own arguments by
    name (`line["out"]`, `line["--limit"]`), which are the default, or None, if they are not given; given: names of the
    arguments that are given. If it asks for help, only `others` and options are read, and nothing is checked."""

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

    run: the function, whose docstring is the text of help; declared: its own arguments, or a function that returns them
    if that needs imports; others: "module:NAME" of the names of arguments that it hands on, such as a run's;
    tables: printed at the end of help, title -> "module:NAME" of names with their meanings; NAME may be a function;
    manual: "module:function" of the text after the tables, which depends on the command line.
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
    def by_name(self) -> dict[str, Argument]:
        return {_key(form): item for form, item in self.arguments.items() if isinstance(item, Argument)}

    @property
    def _named(self) -> list[str]:
        return [name for name in self.by_name if not name.startswith("-")]

    @cached_property
    def words(self) -> Words | None:
        return next((item for item in self.arguments.values() if isinstance(item, Words)), None)

    def read(self, arguments: Sequence[str]) -> CommandLine:
        """Parses a command line. Raises UsageError."""
        parser = Parser(self.name, lambda: itertools.chain(self._named, *map(_resolved, self.others)))
        parser.add_argument("words", nargs="*")
        for form, item in self.arguments.items():
            if isinstance(item, Argument) and form.startswith("-"):
                more: dict[str, Any] = {"action": "append"} if item.several else {}
                more = {"action": "store_true"} if item.kind == "flag" else more
                more = {"nargs": "?", "const": item.choices[0]} if form.endswith("]") else more
                parser.add_argument(*_options(form), dest=_key(form), **more)
        options = vars(parser.read(arguments))
        words = options.pop("words")
        if options.pop("help"):
            others = [word for word in words if word.lstrip("+").partition("=")[0] not in self._named]
            return CommandLine([], others, options, asks_for_help=True)
        named, words, others = self._sorted_out(words)
        given = {name: text for name, text in options.items() if text not in (None, False)}
        given |= values(named, self._named, "parameter" if self.others else "argument")
        see = f"(see specbench {self.name} --help)"
        for form, item in self.arguments.items():
            if isinstance(item, Argument) and item.required and _key(form) not in given:
                raise UsageError(f"{form} is required: {item.line} {see}")
            if isinstance(item, Words) and not item.least <= len(words) <= (item.most or len(words)):
                raise UsageError(f"{self.name} takes {_shown(form, item)}, {item.line} (got {len(words)}) {see}")
        texts = {name: item.default for name, item in self.by_name.items() if item.default is not None} | given
        absent = {name: False if item.kind == "flag" else None for name, item in self.by_name.items()}
        read = {name: _value(name, self.by_name[name], text) for name, text in texts.items()}
        return CommandLine(words, others, absent | read, list(given))

    def _sorted_out(self, arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """The command's own name=value arguments, the words, and the other arguments."""
        names = self._named
        prefixes = tuple({name.partition(".")[0] + "." for name in names if "." in name})  # bench.steps: bench.
        result: tuple[list[str], list[str], list[str]] = [], [], []
        named, words, others = result
        for argument in arguments:
            name, equals, _ = argument.lstrip("+").partition("=")  # Hydra's users write +out=
            if (name in names and (equals or not self.words)) or name.startswith(prefixes):
                named.append(argument.lstrip("+"))
            elif self.words and (not equals or "/" in name or home.expanded(argument).exists()):
                words.append(argument)
            elif self.others:
                others.append(argument)
            else:
                raise unknown("file or argument" if self.words else "argument", name, self.by_name or ["--help"])
        return result

    def help(self, line: CommandLine) -> str:
        """The usage, the docstring of the function, the arguments with their defaults, the tables and the manual."""
        usage = [f"usage: specbench {self.name}"]
        usage += [_shown(form, item) for form, item in self.arguments.items() if not _is_value(form, item)]
        if self.others or any(_is_value(form, item) for form, item in self.arguments.items()):
            usage.append("[name=value ...]")
        text = " ".join(part.replace(" ", "\0") for part in usage)
        text = textwrap.fill(text, _WIDTH, subsequent_indent=" " * 9).replace("\0", " ")
        title = f"specbench {self.name}: {COMMANDS[self.name][1]}"
        lines = [title, "", text, "", inspect.cleandoc(self.run.__doc__ or "")]
        tables = {"": self.arguments} if self.arguments else {}
        tables |= {title: _resolved(where) for title, where in self.tables.items()}
        for title, table in tables.items():
            width = max(map(len, table), default=0)
            lines += ["", *([title] if title else [])]
            lines += [columns((name, _meaning(item)), (width, _WIDTH - width - 4)) for name, item in table.items()]
        if self.manual:
            lines += ["", pkgutil.resolve_name(self.manual)(line)]
        return "\n".join(lines)

    def completions(self, last: str) -> list[str]:
        """The completions of the last, perhaps empty, word of a command line. The shell itself completes file names."""
        texts: list[str] = []
        if self.words and self.words.offers is None and not last:
            return texts
        for form, item in self.arguments.items():
            if isinstance(item, Words):
                texts += item.offers() if item.offers else ()
            elif form.startswith("-"):
                texts.append(_key(form))
            else:
                texts += [f"{_key(form)}={choice}" for choice in [*item.choices, *item.offers()] or [""]]
        return [text for text in texts if text.startswith(last)]


def command(
    name: str, declared: Arguments | Callable[[], Arguments], **more: Any
) -> Callable[[Callable[..., int]], Command]:
    """A decorator that makes a function of a `CommandLine` the command `name`; more: see `Command`."""
    return lambda run: Command(run, name, declared, **more)


def _resolved(where: str) -> Any:
    """The object with the name "module:NAME", or its return value if it is a function."""
    target = pkgutil.resolve_name(where)
    return target() if callable(target) else target


def _options(form: str) -> list[str]:
    return [word.rstrip(",") for word in form.split() if word.startswith("-")]


def _key(form: str) -> str:
    return _options(form)[-1] if form.startswith("-") else form.partition("=")[0]


def _is_value(form: str, item: Argument | Words) -> bool:
    """Whether it is an optional name=value."""
    return isinstance(item, Argument) and not form.startswith("-") and not item.required


def _shown(form: str, item: Argument | Words) -> str:
    """An argument in the usage line."""
    if isinstance(item, Argument):
        return form if item.required else f"[{form.split(', ')[0]}]"
    several = " ..." if item.most is None else ""
    return f"{form}{several}" if item.least else f"[{form}{several}]"


def _meaning(item: Parameter | Words | str) -> str:
    if not isinstance(item, Argument):
        return item if isinstance(item, str) else " ".join(item.line.split())
    choices = f": {', '.join(map(str, item.choices))}" if item.choices else ""
    default = f" (default: {item.default})" if item.default else ""
    return f"{item.line}{choices}{default}"


def columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One row of a table, over as many lines as its longest cell needs."""
    texts = (" ".join(cell.split()) for cell in cells)
    wrapped = [textwrap.wrap(text, width, break_on_hyphens=False) for text, width in zip(texts, widths)]
    rows = itertools.zip_longest(*wrapped, fillvalue="")
    return "\n".join("".join(f"  {cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows)


def _value(name: str, argument: Argument, text: Any) -> Any:
    """An argument's value from its text. Raises UsageError for a value that is not allowed."""
    if isinstance(text, list):
        return [_value(name, argument, part) for part in text]
    value: Any = text if text is True else argument.from_text(name, text)
    if argument.written:
        from specbench.storage.files import writable

        return writable(value)
    return home.expanded(value) if argument.kind == "path" else value


class Parser(argparse.ArgumentParser):
    """The options of a sub-command, including -h. It reports a wrong argument in one sentence, as a UsageError.

    names: returns the names of name=value arguments; called only if an option is unknown."""

    def __init__(self, command: str, names: Callable[[], Iterable[str]]) -> None:
        super().__init__(prog=f"specbench {command}", add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", action="store_true")
        self._names = names

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options and words of a command line. UsageError for an unknown option. If it is an argument as other
        tools spell it, such as `--limit 16` for n=16, the message gives the right form."""
        namespace, rest = self.parse_known_intermixed_args(list(arguments))
        odd = [i for i, argument in enumerate(arguments) if argument in rest and argument.startswith("-")]
        right = [self._right(arguments[i], *arguments[i + 1 : i + 2]) for i in odd]
        if odd and all(right):
            self.error(f"write {' '.join(filter(None, right))} instead of {' '.join(arguments[i] for i in odd)}")
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace

    def _right(self, option: str, following: str = "-") -> str | None:
        """The right form of an unknown option, such as --method=sjd, or --method before its value; None if it resembles
        no argument."""
        name, equals, value = option.partition("=")
        actions, names = self._option_string_actions, list(self._names())
        is_value = not re.match(r"-\D|-$", following) and following.partition("=")[0] not in names
        value = value if equals else following if is_value else ""
        meant = nearest(name, [*names, *actions])
        if meant is None or meant not in actions:
            return meant and f"{meant}={shlex.quote(value) if value else '...'}"
        return meant if actions[meant].nargs == 0 else f"{meant} {shlex.quote(value) if value else '...'}"
