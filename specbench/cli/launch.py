"""Starts the checked runs of `specbench run`, and Hydra where the command line configures it.

Without arguments of Hydra itself, the runs are started here, one after the other. With them, Hydra starts them, in
other processes if its launcher does so: it composes only its own section and sweeps over the number of the run.
Importing this module imports neither torch nor Hydra.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specbench.cli.exits import FAILED, USAGE, fail
from specbench.config import command_line
from specbench.errors import RunError, UsageError, one_line

if TYPE_CHECKING:
    from specbench.harness.planned import Plan, PlannedRun


def start(planned: PlannedRun) -> None:
    """Starts or continues a run, and prints its report."""
    from specbench.harness.run import run

    if planned.label:
        sys.stderr.write(f"specbench: {planned.label}\n")  # print would write the end of the line separately
    print(run(planned.config, planned.folder, asked=planned.asked).report(), flush=True)


def _outcome(planned: PlannedRun) -> Exception | None:
    """Starts a run; returns the error that ended it. In a grid it is printed, and the next one is started."""
    try:
        start(planned)
    except Exception as e:
        if not planned.label:
            return e
        known = isinstance(e, UsageError | RunError)
        text = str(e) if known else f"{type(e).__name__}: {e}"
        fail(text, USAGE)
        return e if known else RunError(text)  # which other processes can send
    return None


def launch(plan: Plan[PlannedRun], overrides: Sequence[str]) -> list[Exception]:
    """Starts a single run, or the runs of a grid; returns the errors of the runs that failed."""
    runs, hydras = plan.runs, hydras_own(overrides)
    if not hydras:
        outcomes = [_outcome(run) for run in runs]
    elif not runs[0].label:
        with _hydra() as app:
            outcomes = [app.run("config", lambda _: _outcome(runs[0]), hydras).return_value]
    else:
        sweep = [f"+job=range({len(runs)})", f"hydra.sweep.dir={command_line.quoted(str(plan.home))}", *hydras]
        with _hydra() as app:
            batches = app.multirun("config", lambda cfg: _outcome(runs[cfg.job]), sweep)
        outcomes = [returned.return_value for batch in batches for returned in batch]
    return [outcome for outcome in outcomes if outcome is not None]


def hydras_own(overrides: Sequence[str]) -> list[str]:
    """The arguments that configure Hydra itself."""
    return [argument for argument in overrides if command_line.is_hydras(argument)]


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
    from hydra.core.utils import env_override

    from specbench.config import configuration, parameters

    conf, version = str(parameters.conf_dir()), configuration.VERSION_BASE
    nothing = hydra.main(version_base=version, config_path=conf, config_name=configuration.CONFIG)(lambda _: None)
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        with _same_logging(), env_override({"HYDRA_FULL_ERROR": "1"}):  # raise to `cli.main`, which prints one sentence
            nothing()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0 if e.code is None else FAILED
    except hydra.errors.HydraException as e:
        raise UsageError(one_line(e)) from e
    finally:
        sys.argv = before
    return 0
