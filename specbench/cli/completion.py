"""Shell completion: `specbench -sc query=bash`."""

from __future__ import annotations

import importlib
import os

from specbench.cli import including
from specbench.cli.arguments import Command
from specbench.cli.commands import COMMANDS, module
from specbench.config import registry


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
            last = line[2].rpartition(" ")[2]
            print(" ".join(_offered(line[1], last)))
            return 0
        os.environ["COMP_LINE"] = f"{line[0]} {line[2]}"
    from specbench.cli.launch import by_hydra

    return by_hydra(arguments)


def _offered(command: str, last: str) -> list[str]:
    """What completes the last word of a sub-command's line, except file names, which the shell completes."""
    run = importlib.import_module(module(command)).main if command in COMMANDS else None
    if isinstance(run, Command):
        return run.offered(last)
    return [argument for argument in _offered_by_hand(command) if argument.startswith(last)]


def _offered_by_hand(command: str) -> list[str]:
    if command == "list":
        from specbench.cli.choices import GROUPS

        return [*GROUPS, "--json"]
    if command == "suite":
        from specbench.tables import suite_files

        return [*suite_files.names(), "--list", "--jobs", "--dry-run", "--no-run", "--format"]
    if command == "tables":
        from specbench.tables.catalog import TABLES

        return [*TABLES, "--list", "--model", "--n", "--jobs", "--dry-run", "--no-run", "--format"]
    if command == "fetch":
        from specbench.config import parameters

        found = {
            "model": [*registry.model_sources()],
            "drafter": [*registry.network_folders()],
            "data": [*registry.data_sources()],
        }
        arguments = [f"{name}={choice}" for name, choices in found.items() for choice in choices]
        return [*arguments, *(f"metrics={name}" for name in parameters.choices("metrics")), "--yes"]
    return []
