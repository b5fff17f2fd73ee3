"""Plausible mistakes, as patches of small functions in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Patches:
    """Replaces attributes until `undo`."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, new: Any) -> None:
        """Raises AttributeError where there is no such attribute to replace."""
        getattr(owner, name)
        self._old.append((owner, name, vars(owner)[name]))  # as it is: a static method, too
        setattr(owner, name, new)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """around(original, *args) replaces a function or method."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **named: Any) -> Any:
            return around(original, *args, **named)

        self.set(owner, name, wrapped)

    def everywhere(self, original: Any, new: Any) -> None:
        """Replaces a function under its name in every module of the project that imported it."""
        for module in [m for n, m in list(sys.modules.items()) if n.startswith("specbench.")]:
            if getattr(module, original.__name__, None) is original:
                self.set(module, original.__name__, new)

    def undo(self) -> None:
        for owner, name, old in reversed(self._old):
            setattr(owner, name, old)
        self._old.clear()


@dataclass(frozen=True)
class Mutant:
    """method: the preset whose default audit shall catch it, and what follows it on the command line. test: the test
    that shall catch it, as pytest names it, where the sequences of no audit can: they have the target's distribution
    all the same."""

    name: str
    mistake: str
    method: str
    apply: Callable[[Patches], None]
    test: str | None = None


def mutant(
    registered: list[Mutant], method: str, mistake: str, test: str | None = None
) -> Callable[[Callable[[Patches], None]], Callable[[Patches], None]]:
    """Registers a patch."""

    def add(apply: Callable[[Patches], None]) -> Callable[[Patches], None]:
        registered.append(Mutant(apply.__name__, mistake, method, apply, test))
        return apply

    return add
