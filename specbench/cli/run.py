"""`specbench run` and `specbench resume`.

`run` takes Hydra's overrides. They are checked here, all jobs of a grid included, before Hydra starts the first one.
Importing this module imports neither torch nor Hydra.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.cli.exits import FAILED, USAGE, fail
from specbench.errors import Parser, RunError, UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.harness.run import Run

#: What became of the jobs that Hydra started in this process: None for a row, else what was raised. Hydra itself would
#: stop at the first failure and print a traceback. A launcher's worker process has no such list, or a copy of it that
#: nobody reads, and raises.
_outcomes: list[BaseException | None] | None = None
_process = os.getpid()
_multirun = False


def main(arguments: list[str]) -> int:
    """`specbench run [-m] [name=value ...]`."""
    parser = Parser(prog="specbench run", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-sc", "--shell-completion", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    if options.shell_completion:
        return by_hydra(arguments)

    from specbench.config import configuration

    given = configuration.quote_paths(options.overrides, options.multirun)
    if options.help:
        from specbench.cli import manual

        print(manual.run(configuration.described(given)), end="")
        return 0
    own = configuration.normalized(given)
    overrides = configuration.plain(own, options.multirun)
    jobs = configuration.grid(overrides, options.multirun)
    if options.hydra_help or options.cfg:
        flags = [
            argument
            for argument in arguments
            if argument not in options.overrides and argument not in ("-m", "--multirun")
        ]
        return by_hydra([*flags, *configuration.shown(overrides)])
    if options.multirun:
        return _grid(overrides, jobs, own)
    return _start(overrides, jobs[0], own)


def _start(overrides: list[str], cfg: dict[str, Any], own: list[str]) -> int:
    """Runs one job, by Hydra where arguments concern it; `own` are the user's arguments, without implied ones."""
    global _outcomes
    from specbench.config import configuration
    from specbench.harness.run import Run

    try:
        if not any(map(configuration.is_hydras, overrides)):
            _execute(Run(cfg))
            return 0
        _outcomes = []
        by_hydra(overrides)
        [outcome] = _outcomes
        if outcome is not None:
            raise outcome
        return 0
    except KeyboardInterrupt as e:
        folder = getattr(e, "folder", None)  # of run.Stopped
        raise KeyboardInterrupt(f"{e}; to go on: {_again(own, folder)}" if folder else str(e)) from e
    finally:
        _outcomes = None


def _execute(one: Run) -> None:
    """Runs a job and prints its report."""
    from specbench.harness.run import report

    print(report(one, one.execute()), flush=True)


_RESUME = """\
usage: specbench resume DIR [name=value ...]

Continues the run in a folder, with the configuration in it. Parameters that do not change an image may be given again:
n (a number, or all), metrics, metrics_dir, reference, baseline, data_dir, workers, ray_address.
"""


def resume(arguments: list[str]) -> int:
    """`specbench resume DIR [name=value ...]`."""
    import yaml

    from specbench.config import configuration, parameters
    from specbench.errors import parse_arguments, values
    from specbench.storage import home

    parsed = parse_arguments("resume", arguments)
    if parsed.help:
        print(_RESUME, end="")
        return 0
    folders = [argument for argument in parsed.arguments if "=" not in argument or Path(argument).is_dir()]
    if len(folders) != 1:
        raise UsageError("name one folder of a run: specbench resume DIR")
    from specbench.harness.run import MAY_CHANGE, Run, Stopped, stored

    folder = home.expanded(folders[0])
    may = [name for name in MAY_CHANGE if name != "out"]
    given = values([argument for argument in parsed.arguments if argument not in folders], may, "parameter")
    if inside := sorted(path.parent.name for path in folder.glob("*/config.yaml")):
        raise UsageError(
            f"{folder} holds {len(inside)} runs: name one ({inside[0]}, ...), or give the `specbench run -m` that began"
            " them"
        )
    cfg = stored(folder)
    if "metrics" in given:  # as in a run, where a set of metrics has a name
        cfg["metrics"] = configuration.compose([f"metrics={given.pop('metrics')}"])["metrics"]
    for name, text in given.items():
        value: Any = text
        if parameters.TABLE[name].kind != "path" or text == "null":
            with suppress(yaml.YAMLError, ValueError):
                value = yaml.safe_load(text)
        cfg[name] = parameters.check(name, value)
    try:
        _execute(Run(cfg, folder))
    except Stopped as e:
        raise KeyboardInterrupt(f"{e}; to go on: specbench resume {shlex.join(parsed.arguments)}") from e
    return 0


def _again(arguments: list[str], folder: Path) -> str:
    """The command that goes on in a folder."""
    from specbench.config import configuration

    remaining = [argument for argument in arguments if not argument.startswith("out=")]
    plain = re.fullmatch(r"[A-Za-z0-9_./-]+", str(folder))
    return f"specbench run {shlex.join([*remaining, f'out={folder if plain else configuration.quoted(str(folder))}'])}"


def _grid(overrides: list[str], jobs: list[dict[str, Any]], own: list[str]) -> int:
    """Hands a grid to Hydra, as `_start`. The jobs' folders lie in one folder; after a job that fails, the next one
    runs."""
    global _outcomes, _multirun
    from specbench.config import configuration
    from specbench.harness.run import check, new_folder
    from specbench.storage import home

    outs = {job["out"] for job in jobs}
    if len(outs) > 1:
        raise UsageError("out= names the folder of the whole grid: give one")
    root = home.expanded(outs.pop() or new_folder())
    if "${" in str(root):
        raise UsageError(f"the folder of a grid cannot hold ${{ (out={root}); choose another out=")
    for cfg in jobs:
        check(cfg)
    _make(root)
    if (root / "config.yaml").exists():
        raise UsageError(f"{root} holds a single run; choose another out= for the grid")
    # Hydra names each job after the keys that differ; the others stand in every job's config.yaml.
    fixed = {argument.split("=", 1)[0] for argument in overrides} - configuration.swept(overrides)
    naming = [
        f"hydra.sweep.dir={configuration.quoted(str(root))}",
        f"hydra.job.config.override_dirname.exclude_keys=[{','.join(sorted(fixed | {'out'}))}]",
    ]
    again = _again(["-m", *own], root)
    _outcomes, _multirun = [], True
    print(f"specbench: {len(jobs)} jobs in {root}", file=sys.stderr)
    try:
        by_hydra(["-m", *configuration.for_grid(overrides), *naming])
        failed = [outcome for outcome in _outcomes if outcome is not None]
        if failed:
            print(
                f"specbench: {len(failed)} of {len(jobs)} jobs failed; only they run again with {again}",
                file=sys.stderr,
            )
            return USAGE if all(isinstance(outcome, UsageError) for outcome in failed) else FAILED
        return 0
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"{str(e) or 'stopped'}; to go on: {again}") from e
    finally:
        _outcomes, _multirun = None, False


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write into {folder} ({e.strerror}); choose another out=") from None


def job(_: DictConfig) -> None:
    """The function that Hydra starts: one job. Its configuration is composed again from the job's arguments, because in
    a grid Hydra's lacks the implied arguments of a single job."""
    try:
        _job()
    except Exception as e:
        if _outcomes is None or os.getpid() != _process:
            raise
        _outcomes.append(e)
        if _multirun:
            fail(str(e) if isinstance(e, UsageError | RunError) else f"{type(e).__name__}: {e}", USAGE)
    else:
        if _outcomes is not None:
            _outcomes.append(None)


def _job() -> None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from specbench.config import configuration
    from specbench.harness.run import Run

    hydra = HydraConfig.get()
    task = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # a path may hold ${
    assert isinstance(task, list)
    given = [str(argument) for argument in task]
    checked = configuration.compose(given)
    out = None
    if hydra.mode == RunMode.MULTIRUN:
        fixed = hydra.job.config.override_dirname.exclude_keys
        arguments = configuration.normalized(given)
        name = ",".join(sorted(w for w in arguments if w.split("=", 1)[0] not in fixed)) or str(hydra.job.num)
        out = Path(hydra.sweep.dir) / re.sub(r"[^\w.=,+-]+", "_", name)
        sys.stderr.write(f"specbench: job {hydra.job.num}: {name}\n")  # print would write the line's end apart
    _execute(Run(checked, out))


def by_hydra(arguments: list[str]) -> int:
    """Hydra's own command line over conf/: runs `job`, or prints help, a configuration or completions."""
    import hydra

    from specbench.config import configuration, parameters

    decorated = hydra.main(
        version_base=configuration.VERSION_BASE,
        config_path=str(parameters.conf_dir()),
        config_name=configuration.CONFIG,
    )(job)
    root = logging.getLogger()
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR"), root.handlers[:], root.level
    sys.argv = [sys.argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise to `main`, which prints one sentence
    try:
        decorated()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0 if e.code is None else FAILED
    except hydra.errors.HydraException as e:
        raise UsageError(configuration.one_line(e)) from e
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before[1]
        root.handlers[:] = before[2]  # --hydra-help leaves one that writes to stdout
        root.setLevel(before[3])
    return 0
