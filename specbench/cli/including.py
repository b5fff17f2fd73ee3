"""`--include DIR` of every command: folders of plug-ins. `--config-dir DIR` and `hydra.searchpath=[...]` of Hydra mean
the same. Importing this module imports neither torch nor Hydra."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specbench.config.plugins import INCLUDED
from specbench.errors import UsageError
from specbench.storage import home
from specbench.storage.reading import read_json

_FLAGS = ("--include", "--config-dir", "-cd")
_SEARCH_PATH = "hydra.searchpath="


def split(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The included folders of a command line, and its other arguments. UsageError for a flag without a folder, and for
    a package that is not installed."""
    folders: list[Path] = []
    others: list[str] = []
    left = iter(arguments)
    for argument in left:
        flag, equals, value = argument.partition("=")
        if flag in _FLAGS:
            folder = value if equals else next(left, "")
            if not folder or (not equals and folder.startswith("-")):
                raise UsageError(f"{flag} needs a folder: {flag} DIR")
            folders.append(Path(folder))
        elif argument.lstrip("+").startswith(_SEARCH_PATH):
            listed = argument.partition("=")[2].strip().removeprefix("[").removesuffix("]").split(",")
            folders += [_folder(text.strip(" '\"")) for text in listed if text.strip()]
        else:
            others.append(argument)
    return folders, others


def remembered(arguments: Sequence[str]) -> list[Path]:
    """The folders that the runs, grids and suites in these arguments were started with, if they still exist: a row can
    be shown without them."""
    folders: list[str] = []
    for argument in arguments:
        path = home.expanded(argument.partition("=")[2] if "=" in argument else argument)
        with suppress(OSError):  # a text that is too long to be a path
            if (file := path / INCLUDED).is_file():
                folders += read_json(file, list[str], "remove it and give --include again")
    for folder in (gone := [folder for folder in dict.fromkeys(folders) if not Path(folder).is_dir()]):
        print(f"specbench: the included folder {folder} is gone", file=sys.stderr)
    return [Path(folder) for folder in dict.fromkeys(folders) if folder not in gone]


def _folder(entry: str) -> Path:
    """The folder of an entry of Hydra's search path: file://DIR, pkg://PACKAGE or DIR."""
    if not entry.startswith("pkg://"):
        return Path(entry.removeprefix("file://"))
    from specbench.config.plugins import folder_of

    folder = folder_of(entry.removeprefix("pkg://"))
    if folder is None:
        raise UsageError(f"{_SEARCH_PATH}{entry}: there is no such package")
    return folder


@contextmanager
def included(folders: Sequence[Path]) -> Iterator[None]:
    """Within the block, these folders are plug-ins."""
    if not folders:
        yield
        return
    from specbench.config import parameters

    with parameters.including(folders):
        yield


def report_faults() -> None:
    """Prints one sentence for each fault of an installed plug-in on stderr. UsageError if an included folder has
    one."""
    from specbench.config import parameters

    available = parameters.found_choices()
    for text in available.faults:
        print(f"specbench: {text}", file=sys.stderr)
    if available.faults_included:
        raise UsageError(available.faults_included[0])
