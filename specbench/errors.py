"""The one exception that reaches a user, a sentence that names the mistake and the way out, and what raises it most."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
from typing import NoReturn


class UsageError(Exception):
    """Bad input. The command line prints the message without a traceback and exits with 2."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """The sentence for a name that does not exist, with the names that do."""
    return UsageError(f"unknown {kind} '{name}' (choose from: {', '.join(sorted(choices))})")


class Parser(argparse.ArgumentParser):
    """Complains in one sentence, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def values(words: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """The words `name=value` of a command line. UsageError for a name that is not known, given twice or without its
    value."""
    given: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known:
            raise unknown("word", name, known)
        if name in given:
            raise UsageError(f"'{name}' is given twice; give it once")
        if not value:
            raise UsageError(f"'{word}' lacks its value: {name}=...")
        given[name] = value
    return given
