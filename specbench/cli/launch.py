"""Starts the checked jobs of `specbench run`, and Hydra where the command line configures it.

A task carries its checked configuration and returns its outcome. Without arguments of Hydra itself, the tasks run here,
one after the other. With them, Hydra starts the tasks, in other processes if its launcher does so: it composes only its
own section and sweeps over the number of the task. Importing this module imports neither torch nor Hydra.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.cli.exits import FAILED, USAGE, fail
from specbench.errors import RunError, UsageError, one_line

if TYPE_CHECKING:
    from specbench.config.run_config import RunConfig


@dataclass(frozen=True)
class Task:
    """A run to start: its checked configuration, its folder (None: `out` of the configuration, or a new one), and, in a
    grid, its number and name for messages."""

    cfg: RunConfig
    folder: Path | None = None
    title: str = ""

    def run(self) -> None:
        """Runs the job and prints its report."""
        from specbench.harness.run import run

        if self.title:
            sys.stderr.write(f"specbench: {self.title}\n")  # print would write the end of the line separately
        print(run(self.cfg, self.folder).report(), flush=True)

    def outcome(self) -> Exception | None:
        """Runs the job; returns the error that ended it. In a grid it is printed, and the next job runs."""
        try:
            self.run()
        except Exception as e:
            if not self.title:
                return e
            known = isinstance(e, UsageError | RunError)
            fail(str(e) if known else f"{type(e).__name__}: {e}", USAGE)
            return e if known else RunError(f"{type(e).__name__}: {e}")  # which other processes can send
        return None


def launch(tasks: Sequence[Task], hydra_arguments: Sequence[str] = (), root: Path | None = None) -> list[Exception]:
    """Runs a single task, or the tasks of a grid in the folder `root`; returns the errors of those that failed."""
    if not hydra_arguments:
        outcomes = [task.outcome() for task in tasks]
    elif root is None:
        with _hydra() as app:
            outcomes = [app.run("config", lambda _: tasks[0].outcome(), list(hydra_arguments)).return_value]
    else:
        from specbench.config import command_line

        folder = f"hydra.sweep.dir={command_line.quoted(str(root))}"
        sweep = [f"+job=range({len(tasks)})", folder, *hydra_arguments]
        with _hydra() as app:
            batches = app.multirun("config", lambda cfg: tasks[cfg.job].outcome(), sweep)
        outcomes = [returned.return_value for batch in batches for returned in batch]
    return [outcome for outcome in outcomes if outcome is not None]


@contextmanager
def _hydra() -> Iterator[Any]:
    """Hydra over conf/; restores the handlers of the root logger afterwards."""
    from hydra.core.global_hydra import GlobalHydra

    from specbench.config import configuration

    with configuration.session(), _same_logging():
        yield GlobalHydra.instance().hydra


@contextmanager
def _same_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers  # --hydra-help leaves one that writes to stdout
        root.setLevel(level)


def by_hydra(arguments: Sequence[str]) -> int:
    """Hydra's own command line over conf/: prints its help, its configuration or completions."""
    import hydra

    from specbench.config import configuration, parameters

    decorated = hydra.main(
        version_base=configuration.VERSION_BASE,
        config_path=str(parameters.conf_dir()),
        config_name=configuration.CONFIG,
    )(_nothing)
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [sys.argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise to `cli.main`, which prints one sentence
    try:
        with _same_logging():
            decorated()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0 if e.code is None else FAILED
    except hydra.errors.HydraException as e:
        raise UsageError(one_line(e)) from e
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before[1]
    return 0


def _nothing(_: Any) -> None:
    """Hydra's application: only its own options are used."""
