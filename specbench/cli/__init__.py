"""`specbench`: the sub-commands and the report of mistakes. A bad argument costs one sentence and exit code 2.

Set SPECBENCH_DEBUG=1 to see tracebacks. Importing this module imports neither torch nor Hydra.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from specbench.cli import commands, including
from specbench.cli.commands import COMMANDS, FAILED, STOPPED, USAGE, debug, fail
from specbench.errors import RunError, UsageError
from specbench.storage.package import __version__

_HEAD = """\
specbench: how a decoding method changes the speed and the quality of an autoregressive image model

usage: specbench COMMAND ...

"""
_FOOT = """

  specbench COMMAND --help                   its arguments
  specbench run method=cool_sd delta=1.1 n=16 out=first
  specbench list methods
  specbench --include DIR list plugins       your own rules, drafters, models, data, metrics: DIR/GROUP/NAME.yaml
  eval "$(specbench -sc install=bash)"       commands, parameters and choices on the tab key, in this shell

exit codes: 0 done, 1 failed, 2 a mistake in the arguments, 3 done but a named metric has no value,
4 done but too many images are degenerate, 130 stopped"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: this process's) and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    folders: list[Path] = []
    try:
        folders, arguments = including.split(arguments)
        folders += [folder for folder in including.remembered(arguments) if folder not in folders]
        with including.included(folders):
            code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except UsageError as e:
        return fail(e, USAGE)
    except RunError as e:
        return fail(e, FAILED)
    except BrokenPipeError:  # `specbench list | head -1`; the remaining output goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt as e:
        return fail(str(e) or "stopped", STOPPED)
    except Exception as e:
        if isinstance(e, OSError) and e.errno == errno.ENAMETOOLONG:
            return fail(UsageError(f"a file name is too long ({str(e.filename)[:40]}...); shorten it"), USAGE)
        if debug():
            raise
        text = " ".join(str(e).split())[:1000]  # some libraries add the frames of their C++ code
        return fail(f"{type(e).__name__}: {text} (SPECBENCH_DEBUG=1 shows where)", FAILED)


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] in (["-sc"], ["--shell-completion"]):
        return _complete(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HEAD + "\n".join(f"  {name:<10} {line}" for name, (_, line) in COMMANDS.items()) + _FOOT)
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"specbench {__version__}")
        return 0
    run = commands.find(arguments[0])
    including.report_faults()
    return run(arguments[1:])


def _complete(arguments: list[str]) -> int:
    """Answers the shell's query `specbench -sc query=bash` for the line in COMP_LINE: completes the sub-command and its
    arguments. Hydra completes the arguments of a run."""
    folders, words = including.split(os.environ.get("COMP_LINE", "").split(" "))
    with including.included(folders):
        if len(words) == 2:
            print(" ".join(name for name in COMMANDS if name.startswith(words[1])))
            return 0
        if len(words) > 2 and words[1] not in ("run", "bench", "probe", "audit"):
            offers = commands.find(words[1]).completions(words[-1]) if words[1] in COMMANDS else []
            print(" ".join(offers))
            return 0
        from specbench.cli.run import by_hydra

        os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
        return by_hydra(arguments)
