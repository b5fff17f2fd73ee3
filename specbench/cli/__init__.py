"""`specbench`: the sub-commands, and how a mistake is told. A bad word costs one sentence and exit code 2.

`run` takes Hydra's overrides. They are checked here, all jobs of a grid included, before Hydra starts the first one.
Set SPECBENCH_DEBUG=1 to see tracebacks. Importing this module imports neither torch nor Hydra.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench._version import __version__
from specbench.errors import Parser, RunError, UsageError, plain, unknown

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.harness.run import Run

USAGE, FAILED, STOPPED = 2, 1, 130  # exit codes beside 0

_HELP = """\
specbench: how much faster, and how much worse, an autoregressive image model becomes under a decoding method

usage: specbench COMMAND ...

  run        decode prompts, score the images, time them against vanilla AR, write one row  specbench run --help
  status     how far the runs in a folder are: done, left, speed, time left, failures       specbench status DIR
  resume     go on with the run in a folder                                                 specbench resume DIR
  list       models, methods, drafters, rules, data, metrics, and whether their weights are here
  fetch      weights of the real models and metrics, and data: sizes and licences first     specbench fetch --help
  evaluate   score pictures that are there already, whoever made them                       specbench evaluate --help
  compare    two runs, picture by picture: paired tests, intervals, effect sizes            specbench compare --help
  reference  statistics of real pictures, which FID and its like compare with               specbench reference --help
  audit      is a method lossless? measured on models whose law is known                    specbench audit --help
  bench      milliseconds per step, part by part, beside the memory floor                   specbench bench --help
  probe      how sure a target is of its tokens, and which earlier ones it heeds            specbench probe --help
  tables     the papers' tables, measured beside published                                  specbench tables --help
  report     one page of results to read and to send: leaderboard, plots, pictures, audits  specbench report --help
  train      a drafter for a target; the embedded models                                    specbench train --help
  convert    an EAGLE drafter to and from LANTERN's layout                                  specbench convert --help

  specbench run method=cool_sd delta=1.1 n=16 out=first
  specbench list methods
  eval "$(specbench -sc install=bash)"       commands, parameters and choices on the tab key, in this shell
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: this process's) and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except UsageError as e:
        return _fail(e, USAGE)
    except RunError as e:
        return _fail(e, FAILED)
    except BrokenPipeError:  # `specbench list | head -1`; what is left to print goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt as e:
        return _fail(str(e) or "stopped", STOPPED)
    except Exception as e:
        if isinstance(e, OSError) and e.errno == errno.ENAMETOOLONG:
            return _fail(UsageError(f"a file name is too long ({str(e.filename)[:40]}...); shorten it"), USAGE)
        if _debug():
            raise
        text = " ".join(str(e).split())[:1000]  # some libraries add the frames of their C++ code
        return _fail(f"{type(e).__name__}: {text} (SPECBENCH_DEBUG=1 shows where)", FAILED)


def _dispatch(words: list[str]) -> int:
    if words[:1] in (["-sc"], ["--shell-completion"]):
        return _complete(words)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if words[0] in ("-V", "--version"):
        print(f"specbench {__version__}")
        return 0
    commands = _commands()
    if words[0] not in commands:
        raise unknown("command", words[0], commands)
    return commands[words[0]](words[1:])


def _commands() -> dict[str, Callable[[list[str]], int]]:
    return {
        "run": run,
        "status": status,
        "resume": resume,
        "list": list_choices,
        "fetch": fetch,
        "evaluate": evaluate,
        "compare": compare,
        "reference": reference,
        "audit": audit,
        "bench": bench,
        "probe": probe,
        "tables": tables,
        "report": report,
        "train": train,
        "convert": convert,
    }


def status(words: list[str]) -> int:
    from specbench.harness.status import main as command

    return command(words)


def fetch(words: list[str]) -> int:
    from specbench.storage.fetch import main as command

    return command(words)


def evaluate(words: list[str]) -> int:
    from specbench.harness.evaluate import main as command

    return command(words)


def compare(words: list[str]) -> int:
    from specbench.compare.cli import main as command

    return command(words)


def reference(words: list[str]) -> int:
    from specbench.cli.reference import main as command

    return command(words)


def bench(words: list[str]) -> int:
    from specbench.bench.cli import main as command

    return command(words)


def probe(words: list[str]) -> int:
    from specbench.probe.cli import main as command

    return command(words)


def audit(words: list[str]) -> int:
    from specbench.audit.cli import main as command

    return command(words)


def tables(words: list[str]) -> int:
    from specbench.tables.cli import main as command

    return command(words)


def report(words: list[str]) -> int:
    from specbench.report.cli import main as command

    return command(words)


def train(words: list[str]) -> int:
    from specbench.training.cli import main as command

    return command(words)


def convert(words: list[str]) -> int:
    from specbench.training.convert import main as command

    return command(words)


def _fail(what: object, code: int) -> int:
    if _debug() and isinstance(what, BaseException):
        raise what
    print(f"specbench: {plain(what)}", file=sys.stderr)  # names and cells of files that nobody vouches for
    return code


def _debug() -> bool:
    return os.environ.get("SPECBENCH_DEBUG", "") not in ("", "0")


# --- run --------------------------------------------------------------------------------------------------------------

#: What became of the jobs that Hydra started in this process: None for a row, else what was raised. Hydra itself would
#: stop at the first failure and print a traceback. A launcher's worker process has no such list, or a copy of it that
#: nobody reads, and raises.
_outcomes: list[BaseException | None] | None = None
_process = os.getpid()
_multirun = False


def run(words: list[str]) -> int:
    """`specbench run [-m] [name=value ...]`."""
    parser = Parser(prog="specbench run", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-sc", "--shell-completion", action="store_true")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_intermixed_args(words)
    if asked.shell_completion:
        return _hydra(words)

    from specbench.config import configuration

    given = configuration.literal(asked.overrides, asked.multirun)
    if asked.help:
        from specbench.cli import manual

        print(manual.run(configuration.described(given)), end="")
        return 0
    own = configuration.tidy(given)
    overrides = configuration.plain(own, asked.multirun)
    jobs = configuration.grid(overrides, asked.multirun)
    if asked.hydra_help or asked.cfg:
        flags = [word for word in words if word not in asked.overrides and word not in ("-m", "--multirun")]
        return _hydra([*flags, *configuration.shown(overrides)])
    if asked.multirun:
        return _grid(overrides, jobs, own)
    return _start(overrides, jobs[0], own)


def _start(overrides: list[str], cfg: dict[str, Any], own: list[str]) -> int:
    """Runs one job, by Hydra where it has a say; `own` are the user's words, without what goes without saying."""
    global _outcomes
    from specbench.config import configuration
    from specbench.harness.run import Run

    try:
        if not any(map(configuration.is_hydras, overrides)):
            _execute(Run(cfg))
            return 0
        _outcomes = []
        _hydra(overrides)
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

Goes on with the run in a folder, by the configuration that stands there. Parameters that do not change what an image
is may be given again: n (a number, or all), metrics, metrics_dir, reference, baseline, data_dir, workers, ray_address.
"""


def resume(words: list[str]) -> int:
    """`specbench resume DIR [name=value ...]`."""
    import yaml

    from specbench.config import configuration, parameters
    from specbench.errors import asked, values
    from specbench.storage import home

    told = asked("resume", words)
    if told.help:
        print(_RESUME, end="")
        return 0
    folders = [word for word in told.words if "=" not in word or Path(word).is_dir()]
    if len(folders) != 1:
        raise UsageError("name one folder of a run: specbench resume DIR")
    from specbench.harness.run import MAY_CHANGE, Run, Stopped, stored

    folder = home.expanded(folders[0])
    may = [name for name in MAY_CHANGE if name != "out"]
    given = values([word for word in told.words if word not in folders], may, "parameter")
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
        raise KeyboardInterrupt(f"{e}; to go on: specbench resume {shlex.join(told.words)}") from e
    return 0


def _again(words: list[str], folder: Path) -> str:
    """The command that goes on in a folder."""
    from specbench.config import configuration

    kept = [word for word in words if not word.startswith("out=")]
    plain = re.fullmatch(r"[A-Za-z0-9_./-]+", str(folder))
    return f"specbench run {shlex.join([*kept, f'out={folder if plain else configuration.quoted(str(folder))}'])}"


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
    fixed = {word.split("=", 1)[0] for word in overrides} - configuration.swept(overrides)
    naming = [
        f"hydra.sweep.dir={configuration.quoted(str(root))}",
        f"hydra.job.config.override_dirname.exclude_keys=[{','.join(sorted(fixed | {'out'}))}]",
    ]
    again = _again(["-m", *own], root)
    _outcomes, _multirun = [], True
    print(f"specbench: {len(jobs)} jobs in {root}", file=sys.stderr)
    try:
        _hydra(["-m", *configuration.for_grid(overrides), *naming])
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
    """What Hydra starts: one job. Its configuration is composed anew from the job's words, because in a grid Hydra's
    lacks what goes without saying for one job alone."""
    try:
        _job()
    except Exception as e:
        if _outcomes is None or os.getpid() != _process:
            raise
        _outcomes.append(e)
        if _multirun:
            _fail(str(e) if isinstance(e, UsageError | RunError) else f"{type(e).__name__}: {e}", USAGE)
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
    given = [str(word) for word in task]
    checked = configuration.compose(given)
    out = None
    if hydra.mode == RunMode.MULTIRUN:
        fixed = hydra.job.config.override_dirname.exclude_keys
        words = configuration.tidy(given)
        name = ",".join(sorted(w for w in words if w.split("=", 1)[0] not in fixed)) or str(hydra.job.num)
        out = Path(hydra.sweep.dir) / re.sub(r"[^\w.=,+-]+", "_", name)
        sys.stderr.write(f"specbench: job {hydra.job.num}: {name}\n")  # print would write the line's end apart
    _execute(Run(checked, out))


def _hydra(words: list[str]) -> int:
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
    sys.argv = [sys.argv[0], *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise to `main`, which says it in one sentence
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


def _complete(words: list[str]) -> int:
    """The shell's question `specbench -sc query=bash`: completes the sub-command and what `_offered` knows; the words
    of a run are Hydra's to complete."""
    line = os.environ.get("COMP_LINE", "").split(" ", 2)
    if len(line) == 2:
        print(" ".join(name for name in _commands() if name.startswith(line[1])))
        return 0
    if len(line) == 3:
        if line[1] not in ("run", "bench", "probe", "audit"):
            last = line[2].rpartition(" ")[2]
            print(" ".join(word for word in _offered(line[1]) if word.startswith(last)))
            return 0
        os.environ["COMP_LINE"] = f"{line[0]} {line[2]}"
    return _hydra(words)


def _offered(command: str) -> list[str]:
    """The words that a sub-command takes, beside names of files, which the shell completes."""
    if command == "list":
        return [*_LISTED, "--json"]
    if command == "tables":
        from specbench.tables.catalog import TABLES

        return [*TABLES, "--list", "--model", "--n", "--no-run", "--format"]
    if command == "fetch":
        from specbench.config import parameters
        from specbench.storage import sources

        found = {"model": [*sources.MODELS], "drafter": [*sources.DRAFTERS], "data": [*sources.DATA]}
        words = [f"{name}={choice}" for name, choices in found.items() for choice in choices]
        return [*words, *(f"metrics={name}" for name in parameters.choices("metrics")), "--yes"]
    return []


# --- list -------------------------------------------------------------------------------------------------------------

_LISTED = {
    "models": "model",
    "methods": "method",
    "drafters": "drafter",
    "rules": "rule",
    "data": "data",
    "metrics": "metrics",
    "protocols": "protocol",
}


def list_choices(words: list[str]) -> int:
    """`specbench list [models|methods|drafters|rules|data|metrics|protocols ...] [--json]`."""
    parser = Parser(
        prog="specbench list", description="What there is to choose from, and whether its weights are here."
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"any of {', '.join(_LISTED)}; all by default")
    parser.add_argument(
        "--json", action="store_true", help="as JSON: name, line, weights (true, false, null: needs none)"
    )
    try:
        asked = parser.parse_args(words)
    except SystemExit as e:  # --help
        return int(e.code or 0)
    wanted = [
        next((name for name in _LISTED if given in (name, name.removesuffix("s"))), given) for given in asked.groups
    ]
    for name in wanted:
        if name not in _LISTED:
            raise unknown("group", name, _LISTED)
    found = {name: _entries(group) for name, group in _LISTED.items() if not wanted or name in wanted}
    if asked.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 0
    for title, entries in found.items():
        print(title)
        width = max((len(entry["name"]) for entry in entries), default=0)
        for entry in entries:
            mark = {True: "  [weights here]", False: "  [weights absent]", None: ""}[entry["weights"]]
            print(f"  {entry['name']:<{width}}  {entry['line']}{mark}")
    return 0


def _entries(group: str) -> list[dict[str, Any]]:
    """Name, line and presence of weights (None: needs none) of every choice of a group."""
    from specbench import metrics
    from specbench.config import parameters, registry
    from specbench.storage import home

    lines = dict(parameters.choices(group))
    absent: dict[str, list[str]] = {}  # only of what needs weights
    if group == "metrics":
        lines |= metrics.available()
        here = metrics.Place(metrics.ASSETS, home.metrics_folder())
        absent = {name: [text] if (text := metrics.missing(name, here)) else [] for name in metrics.available()}
    elif group in ("model", "drafter"):
        for name in lines:
            entry = registry.entry(group, name)
            if entry.assets:  # a drafter's, for the embedded target
                absent[name] = [f for f in entry.assets if not (registry.ASSETS / f).is_file()]
            elif entry.parts:
                absent[name] = [part for part in entry.parts if not (home.model_folder(name) / part).is_dir()]
    return [
        {"name": name, "line": line, "weights": not absent[name] if name in absent else None}
        for name, line in lines.items()
    ]
