"""`specbench train`: a drafter for a target, or the embedded models."""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if arguments[:1] == ["scenes"]:
        from specbench.training.embedded import main as command
    else:
        from specbench.training.command import main as command
    return command(arguments)
