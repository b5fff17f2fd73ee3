"""Shell completion: `specbench -sc query=bash`."""

from __future__ import annotations

import importlib
import os

from specbench.cli import including
from specbench.cli.arguments import Command
from specbench.cli.commands import COMMANDS, module


def complete(arguments: list[str]) -> int:
    """The shell's query `specbench -sc query=bash`: completes the sub-command and its own arguments; Hydra completes
    those of a run."""
    folders, words = including.split(os.environ.get("COMP_LINE", "").split(" "))
    with including.included(folders):
        return _complete(arguments, " ".join(words))


def _complete(arguments: list[str], text: str) -> int:
    """The same for the line that was typed, without included folders."""
    line = text.split(" ", 2)
    if len(line) == 2:
        print(" ".join(name for name in COMMANDS if name.startswith(line[1])))
        return 0
    if len(line) == 3:
        if line[1] not in ("run", "bench", "probe", "audit"):
            run = importlib.import_module(module(line[1])).main if line[1] in COMMANDS else None
            print(" ".join(run.offered(line[2].rpartition(" ")[2]) if isinstance(run, Command) else []))
            return 0
        os.environ["COMP_LINE"] = f"{line[0]} {line[2]}"
    from specbench.cli.run import by_hydra

    return by_hydra(arguments)
