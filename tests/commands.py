"""Command lines in tests: the results of the fixture `call`, in a fresh interpreter, and in a copy of the package."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.errors import UsageError
from specbench.rows.csv_files import read_rows
from specbench.rows.remark import remarks_of
from specbench.rows.remark_text import joined
from specbench.rows.scores import Score
from specbench.tables.definitions import Line, Table

ROOT = Path(__file__).resolve().parents[1]
Call = Callable[..., tuple[int, str, str]]
#: Runs command lines in one process, and then code. An audit's exit code is 1 if it refutes a method.
TOGETHER = (
    "import json, sys; from specbench import cli;"
    " failed = any([cli.main(w) > (w[0] == 'audit') for w in json.loads(sys.argv[1])]);"
    " exec(*sys.argv[2:] or ['']); sys.exit(failed)"
)


def python(code: str, *arguments: str, cwd: Path = Path("/"), package: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a fresh interpreter outside of the repository."""
    env = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", code, *arguments]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


def copy_package(folder: Path) -> None:
    """Copies specbench/ and conf/, with their bytecode, to a folder where tests add files; the weights stay in their
    place."""
    for part in ("specbench", "conf"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("assets"))
    (folder / "specbench/assets").symlink_to(ROOT / "specbench/assets")


def run_copy(folder: Path, lines: Sequence[Sequence[str]], code: str = "") -> str:
    """The output of these command lines and of the code after them, run by the copied package."""
    done = python(TOGETHER, json.dumps(lines), code, cwd=folder, package=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def overrides(table: Table, line: Line, model: str, n: int | None = None) -> list[str] | None:
    """The arguments of the run of a table's line on a model; None if it has no run there."""
    suite = table.on(model, n)
    return None if table.no_run(line, model) else suite.overrides(line, next(suite.cells()))


def checked(values: dict[str, Any]) -> str:
    """A journal's line with its checksum, also of numbers that JSON does not have."""
    text = json.dumps(values, ensure_ascii=False)
    return f'{text[:-1]}, "check": "{zlib.crc32(text.encode()):08x}"}}'


def cells_of(path: str | Path) -> list[dict[str, str]]:
    """The lines of a CSV file as text."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def row_of(folder: str | Path) -> dict[str, Any]:
    [row] = read_rows(Path(folder) / "row.csv")
    return row


def said(of: Mapping[str, Any] | Score) -> str:
    """The remarks of a row or a score as one text."""
    return joined(of.remarks if isinstance(of, Score) else remarks_of(of))


def refused(call: Call, *arguments: str) -> str:
    """The error of a command line that ends with exit code 2: exactly one line, after its progress."""
    code, out, err = call(*arguments)
    assert (code, out) == (2, ""), err
    assert err.splitlines()[-1].startswith("specbench: "), err
    assert "Traceback" not in err
    return err


def usage_error(act: Callable[..., Any], *arguments: Any) -> str:
    """The message of the UsageError that a call raises."""
    try:
        act(*arguments)
    except UsageError as e:
        return str(e)
    raise AssertionError(f"nothing is refused: {arguments}")


@contextlib.contextmanager
def case(*what: object) -> Iterator[None]:
    """A failure in this block names its case of a loop."""
    try:
        yield
    except BaseException as e:
        e.add_note(f"case: {', '.join(map(str, what))}")
        raise
