"""The one exception that reaches a user, a sentence that names the mistake and the way out, and what raises it most."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
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
