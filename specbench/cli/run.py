"""`specbench run`: checks the arguments of all jobs, then starts the first one.

Without arguments of Hydra itself, the runs are started here, one after the other. With such arguments, Hydra starts
them, in other processes if its launcher does so. It composes only its own section, and sweeps over the number of the
run. Importing this module imports neither torch nor Hydra.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.cli.arguments import Argument, CommandLine, command
from specbench.cli.commands import FAILED, USAGE, code_of, fail
from specbench.config import command_line, parameters
from specbench.errors import RunError, UsageError, one_line
from specbench.harness.planned import Plan, PlannedRun
from specbench.rows.provenance import decoding_hash
from specbench.storage import home
from specbench.storage.files import bounded_name, sha256, write_atomically
from specbench.storage.reading import read_json

if TYPE_CHECKING:
    from specbench.config.configuration import Job

GRID = "grid.json"  # in a grid's folder: the arguments of `specbench run -m`
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")  # Hydra's choices


@command(
    "run",
    {
        "-m, --multirun": Argument("flag", "a grid: several values of a parameter, a job for each combination"),
        "--dry-run": Argument("flag", "images, time, hours on a GPU, disk, memory and what to fetch; decodes nothing"),
        "device_for=NAME": Argument("string", "GPU for --dry-run, such as h200"),
        "-c, --cfg WHAT": Argument(
            "string", "show the configuration that a run would use", choices=("job", "hydra", "all")
        ),
        "--hydra-help": Argument("flag", "Hydra's own arguments: launchers and sweepers of grids, logging"),
        "--info [WHAT]": Argument("string", "Hydra's information on the configuration", choices=_INFO),
    },
    others=["specbench.config.parameters:table"],
    manual="specbench.cli.manual:run",
)
def main(line: CommandLine) -> int:
    """Runs a method on a model: decodes prompts, scores the images, times them against vanilla decoding, and writes one
    row. out=DIR chooses the run's folder (default: runs/<date>/<time>-<id>/). If a run was stopped, the same command
    with the same out= continues it. Exit code 3: done, but a requested metric has no value.

      specbench run method=cool_sd delta=1.1 n=16 out=first
      specbench run method=sd rule=cool delta=2                            any drafter with any rule
      specbench run prompts=my.txt                                         every line of a file
      specbench run -m method=cool_sd delta=1.1,2 nu=0.5,0.7 out=grid      a job for each combination
      specbench run -m experiment=coolsd_delta                             a grid from conf/experiment
      specbench run --dry-run                                              what a run would need
      specbench run --cfg job                                              the configuration that it would use
      specbench run protocol=coolsd_table1 model=llamagen_xl method=cool_sd delta=1.1
                                                                           after specbench fetch

    The parameters depend on the choices: specbench run method=sjd_pac model=emu3 --help. For all choices: specbench
    list methods.
    """
    from specbench.config import configuration

    multirun = line["--multirun"]
    overrides = command_line.read(line.others, multirun)
    jobs = configuration.grid(overrides, multirun)
    if line["--info"]:
        return by_hydra(["--info", line["--info"], *overrides])
    if line["--hydra-help"]:
        return by_hydra(["--hydra-help", *hydras_own(overrides)])
    if line["--cfg"]:
        return _show(line["--cfg"], jobs, overrides)
    from specbench.bench.devices import only_dry
    from specbench.harness.folder import new_folder

    only_dry(line["device_for"], line["--dry-run"])
    plan = of_jobs(jobs, multirun, Path("runs", "NEW") if line["--dry-run"] else new_folder())
    if line["--dry-run"]:
        from specbench.tables import forecast

        again = shlex.join(["specbench", "run", *["-m"] * multirun, *overrides])
        if multirun:
            _check_grid(plan, overrides)
        text, mistake = forecast.report(plan.title, plan.runs, again, line["device_for"])
        if mistake is not None:  # the run would do nothing
            raise mistake
        print(text)
        return 0
    if multirun:
        return grid(plan, overrides)
    try:
        for error in launch(plan, overrides):
            raise error
    except KeyboardInterrupt as e:
        folder = getattr(e, "folder", None)  # an attribute of run.Stopped
        raise KeyboardInterrupt(f"{e}; to continue: {_command(overrides, folder)}" if folder else str(e)) from e
    return code_of(plan.runs)


def _show(what: str, jobs: Sequence[Job], overrides: Sequence[str]) -> int:
    """Prints the configurations of the jobs, Hydra's configuration, or both."""
    import yaml

    if what != "hydra":
        texts = (yaml.safe_dump(job.cfg.plain(), sort_keys=False, allow_unicode=True) for job in jobs)
        print("---\n".join(texts), end="", flush=True)
    return 0 if what == "job" else by_hydra(["--cfg", "hydra", *hydras_own(overrides)])


def grid(plan: Plan[PlannedRun], overrides: Sequence[str]) -> int:
    """Runs the jobs of a grid, and prints how many are finished and the command that shows their rows. A failed job
    does not stop the others."""
    from specbench.harness.run import check_inputs
    from specbench.harness.status import summary

    root, again = plan.home, _command(["-m", *overrides], plan.home)
    arguments = _check_grid(plan, overrides)
    for run in plan.runs:
        if run.status().state != "finished":
            check_inputs(run.config)
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_grid(root, arguments)
    except OSError as e:
        raise UsageError(f"cannot write into {root} ({e.strerror}); choose another out=") from None
    print(f"specbench: {plan.title}", file=sys.stderr)
    try:
        failed = launch(plan, overrides)
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"{str(e) or 'stopped'}; to continue: {again}") from e
    print(summary(root, [run.status() for run in plan.runs]))
    if len(failed) < len(plan.runs):
        print(f"to compare the jobs: specbench show {shlex.quote(str(root))}", flush=True)
    code = code_of(plan.runs)
    if not failed:
        return code
    count = f"{len(failed)} of {len(plan.runs)}"
    print(f"specbench: {count} jobs failed; to run only these again: {again}", file=sys.stderr)
    return USAGE if all(isinstance(error, UsageError) for error in failed) else FAILED


def _command(overrides: Sequence[str], folder: Path) -> str:
    """The command that continues in a folder."""
    others = [argument for argument in overrides if not argument.startswith("out=")]
    simple = re.fullmatch(r"[A-Za-z0-9_./-]+", str(folder))
    arguments = shlex.join([*others, f"out={folder if simple else command_line.quoted(str(folder))}"])
    return f"specbench run{parameters.including_flags()} {arguments}"


def start(planned: PlannedRun) -> None:
    """Starts or continues a run, and prints its report."""
    from specbench.harness.run import run

    if planned.label:
        sys.stderr.write(f"specbench: {planned.label}\n")  # print would write the newline separately
    print(run(planned.config, planned.folder, asked=planned.asked).report(), flush=True)


def _outcome(planned: PlannedRun) -> Exception | None:
    """Starts a run and returns the error that ended it. In a grid the error is printed, and the next run starts."""
    try:
        start(planned)
    except Exception as e:
        if not planned.label:
            return e
        known = isinstance(e, UsageError | RunError)
        text = str(e) if known else f"{type(e).__name__}: {e}"
        fail(text, USAGE)
        return e if known else RunError(text)  # which can be pickled
    return None


def launch(plan: Plan[PlannedRun], overrides: Sequence[str]) -> list[Exception]:
    """Starts a single run, or the runs of a grid, and returns the errors of the runs that failed."""
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
    """Hydra with conf/; restores the handlers of the root logger afterwards."""
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
        root.handlers[:] = handlers  # --hydra-help adds one that writes to stdout
        root.setLevel(level)


def by_hydra(arguments: Sequence[str]) -> int:
    """Hydra's own command line with conf/: prints its help, its configuration or completions."""
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


def of_jobs(jobs: Sequence[Job], multirun: bool, new: Path) -> Plan[PlannedRun]:
    """The run of a command line, or the runs of its grid, each in its folder inside one folder. new: the folder if out=
    is not given. UsageError for a grid with several out=, or for a folder name that Hydra cannot read."""
    outs = {job.cfg.out for job in jobs}
    if len(outs) > 1:
        raise UsageError("out= names the folder of the grid: give only one")
    root = home.expanded(outs.pop() or new)
    if not multirun:
        return Plan(str(root), root, (PlannedRun(root, jobs[0].cfg, asked=jobs[0].asked),))
    if "${" in str(root):
        raise UsageError(f"the folder of a grid cannot hold ${{ (out={root}); choose another out=")
    names = [bounded_name(re.sub(r"[^\w.=,+-]+", "_", job.name)) for job in jobs]
    folders = [  # the folders of a/b and a_b differ
        root / (name if name == job.name or names.count(name) == 1 else f"{name}-{sha256(job.name, 8)}")
        for name, job in zip(names, jobs)
    ]
    runs = [
        PlannedRun(folder, job.cfg, label=f"job {i}: {job.name}", asked=job.asked)
        for i, (folder, job) in enumerate(zip(folders, jobs, strict=True))
    ]
    return Plan(f"{len(jobs)} jobs in {root}", root, tuple(runs))


def _check_grid(plan: Plan[PlannedRun], overrides: Sequence[str]) -> list[str]:
    """The arguments of a grid that its folder stores. UsageError if its launcher is missing, or if the folder contains
    a run, or a grid with other arguments that `resume` could not continue after this one: a job that was started has
    other parameters here, or is not finished and not part of this grid."""
    from specbench.config import configuration

    arguments = [argument for argument in overrides if not argument.startswith("out=")]
    configuration.check_launcher(hydras_own(overrides))
    if (plan.home / "config.yaml").exists():
        raise UsageError(f"{plan.home} holds a single run; choose another out= for the grid")
    root, hashes = plan.home, {run.folder: decoding_hash(run.config) for run in plan.runs}
    try:
        before = in_folder(root).runs if is_grid(root) and arguments_of(root) != arguments else ()
    except UsageError:  # no command can continue it
        return arguments
    for run in before:
        if not run.folder.exists():
            continue
        here = hashes.get(run.folder)
        if here != decoding_hash(run.config) if here else run.status().state != "finished":
            raise UsageError(
                f"{root} holds another grid, with the job {run.folder.name}: choose another out=, or continue that grid"
                f" with specbench resume {shlex.quote(str(root))}"
            )
    return arguments


def write_grid(root: Path, arguments: Sequence[str]) -> None:
    """Stores the arguments of a grid in its folder, from which `status` and `resume` read them."""
    write_atomically(root / GRID, (json.dumps(list(arguments)) + "\n").encode())
    parameters.remember_included(root)


def arguments_of(root: Path) -> list[str]:
    """The arguments of the grid in a folder. UsageError if they cannot be read."""
    arguments = read_json(root / GRID, list[str], "repeat the `specbench run -m` that started the grid")
    return list(arguments)


def is_suite(folder: Path) -> bool:
    return (folder / "suite.yaml").is_file()


def is_grid(folder: Path) -> bool:
    return (folder / GRID).is_file()


def in_folder(folder: Path) -> Plan[Any]:
    """The runs of the suite or of the grid in a folder."""
    if is_suite(folder):
        from specbench.tables import table_runs

        return table_runs.plan_suite(table_runs.in_folder(folder), folder)
    from specbench.config import configuration

    arguments = [*arguments_of(folder), f"out={command_line.quoted(str(folder))}"]
    return of_jobs(configuration.grid(arguments, multirun=True), True, folder)
