"""The exceptions that reach a user as one sentence, which names the mistake and the way out, and the functions that
raise most of them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
#: Names in other tools, normalized by `_squashed` -> the names in specbench.
_ELSEWHERE = {
    **dict.fromkeys(("limit", "numsamples", "maxsamples", "nsamples", "numimages", "numprompts"), "n"),
    **dict.fromkeys(("output", "outputdir", "outputpath", "outdir", "o"), "out"),
    **dict.fromkeys(("batchsize", "bs"), "batch"),
    **dict.fromkeys(("guidancescale", "guidance", "cfg"), "cfg_scale"),
}


class UsageError(Exception):
    """Bad input. The command line prints the message without a traceback and exits with 2."""


class NumberError(UsageError):
    """A model produced values that are not finite, or probabilities that do not sum to 1, because its weights, the
    guidance scale and the precision do not match. No token that was drawn from them is used in an image."""


class MissingFilesError(UsageError):
    """Weights or data that a run needs are not on this machine. A dry run lists them and how to get them.

    is_published: whether `specbench fetch` can download them."""

    def __init__(self, message: str, is_published: bool = False) -> None:
        super().__init__(message)
        self.is_published = is_published


class RunError(Exception):
    """Work that was started and could not be finished although the arguments are valid: a full disk, too little memory.
    The command line prints the message without a traceback and exits with 1."""


def install(extra: str) -> str:
    """The command that installs an extra of the project; until the project is published, from the checkout."""
    return f"uv pip install -e '.[{extra}]' in the checkout"


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or the error's class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def plain(value: object) -> str:
    """Text of a file that is safe to print: control characters are replaced, so that none reaches the terminal."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def unknown(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """The error for a name that does not exist. It lists the existing names and suggests the one that was meant."""
    known = sorted(choices)
    return UsageError(f"unknown {kind} '{name[:100]}' (choose from: {', '.join(known)}){meant(name, known)}")


def meant(name: object, choices: Iterable[str]) -> str:
    """The end of a sentence about a name that does not exist: the choice that was probably meant, if there is one."""
    near = nearest(str(name), choices)
    return f"; did you mean {near}?" if near else ""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that was probably meant: one that is equal except for case, dashes, underscores, pluses (LANTERN++:
    lantern_pp) or the part before a dot, one that other tools call so (limit: n), or one that differs in a few letters.
    """
    import difflib

    ordered = sorted(choices)
    known = {_squashed(choice.rpartition(".")[2]): choice for choice in reversed(ordered)}
    known |= {_squashed(choice): choice for choice in reversed(ordered)}
    wanted = _squashed(name[:100])
    if wanted not in known and _ELSEWHERE.get(wanted) in ordered:
        return _ELSEWHERE[wanted]
    near = difflib.get_close_matches(wanted, known, 1, 0.75)
    return known[near[0]] if wanted and near else None


def _squashed(name: str) -> str:
    return re.sub(r"[\W_]", "", name.casefold().replace("+", "p"))


def steps(first: str, *others: str) -> str:
    """The next step to get something that is missing, followed by alternatives."""
    return f"{first} (or: {'; or: '.join(others)})" if others else first


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise UsageError unless a parameter's value is one of the choices."""
    if value not in choices:
        raise unknown(name, str(value), choices)


def values(arguments: Iterable[str], known: Collection[str], kind: str = "argument") -> dict[str, str]:
    """The arguments `name=value` of a command line. UsageError for a name that is unknown, repeated or without a value;
    kind: the noun for an unknown name."""
    texts: dict[str, str] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in known:
            raise unknown(kind, name, known)
        if name in texts:
            raise UsageError(f"'{name}' is given twice; give it only once")
        if not value:
            raise UsageError(f"'{argument}' has no value: write {name}=...")
        texts[name] = value
    return texts


def decimal(text: str) -> float:
    """The number in a cell, a condition or an argument: digits 0 to 9, optionally with a point and an exponent.
    ValueError for anything else that `float` accepts, such as 1_0, an infinity or the digits of another script."""
    if _NUMBER.fullmatch(text) is None or not math.isfinite(number := float(text)):
        raise ValueError("it is not a number")
    return number
