"""The parameters of a run that a benchmark of steps takes."""

from __future__ import annotations

from collections.abc import Iterable

from specbench.config import command_line, parameters
from specbench.errors import UsageError

_UNUSED = frozenset(
    "n seed shard shards baseline warmup data split prompts metrics protocol reference metrics_dir data_dir"
    " workers ray_address experiment".split()
)


def names() -> list[str]:
    """Those names."""
    return [name for name in parameters.table() if name not in _UNUSED]


def check(arguments: Iterable[str]) -> None:
    """UsageError for an argument of other steps of a run, and of Hydra."""
    for key in (argument.partition("=")[0] for argument in arguments):
        if key in _UNUSED or command_line.is_hydras(key):
            raise UsageError(f"'{key}' belongs to specbench run; a benchmark times steps and has no such parameter")
