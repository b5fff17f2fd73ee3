"""Files of prompts: the user's own (`data=prompts prompts=FILE`), and data sets that consist of one such file.

The suffix of the file's name determines its format:

- .txt: one prompt per line; blank lines are skipped.
- .tsv, .csv: a header with a column prompt, caption or text (the first of these that exists, in upper or lower case),
  and optionally id or file_name (of the image, as in Hugging Face's metadata.csv) and category. Other columns are
  ignored. A TSV has no quoting, like PartiPrompts.tsv: a quotation mark is part of its prompt. A CSV is quoted as in
  RFC 4180.
- .json: a list of prompts, or an object that maps ids to prompts. A prompt in a list is a text, or an object with
  prompt, caption or text, and optionally id or file_name.
- .jsonl: one such text or object per line; blank lines are skipped.

A prompt without an id is named by its number, counted from 1: the line of a text or JSONL file, the row below a header,
or the entry of a list. A user's file is read from the top: the first image belongs to its first prompt, and `seed` only
keys the random streams. For a data set, `seed` also chooses the subset.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from specbench.config.run_config import PromptSelection
from specbench.data import base
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.storage import home
from specbench.storage.csv_text import other_separator
from specbench.storage.reading import parse_json, read_text

#: Data set -> its file, in `data_dir` unless the package includes it.
DATA_SETS = {
    # PartiPrompts (Yu et al. 2022): 1,632 prompts, most of them hard. Challenge and Note are not used.
    "parti": "PartiPrompts.tsv",
    # DPG-Bench (Hu et al. 2024): 1,065 long prompts; metrics=dpg has the questions. Ids are the authors' names.
    "dpg": "dpg.tsv",
}
CARRIED = Path(__file__).with_name("files")

COLUMNS = ("prompt", "caption", "text")
IDS = ("id", "file_name")
LONGEST_CATEGORY = 100  # characters


def items(wanted: PromptSelection) -> list[Item]:
    """The first `n` prompts of the file."""
    return base.first(read(home.expanded(wanted.own["prompts"])), wanted)


def subset(wanted: PromptSelection) -> list[Item]:
    """`n` prompts of one of `DATA_SETS`, chosen by `seed`."""
    file = CARRIED / DATA_SETS[wanted.data]
    if not file.is_file():
        file = base.find(wanted, file.name)
    return base.subset(read(file), wanted)


def read(path: Path) -> list[Item]:
    """All prompts of a file, in order. Raises UsageError if a part of the file cannot be read."""
    if path.suffix.lower() not in _READERS:
        read_text(path)  # first report a path that is not a readable file
        raise UsageError(f"cannot determine the format of {path}: its name must end in {', '.join(_READERS)}")
    return base.check_ids(list(_READERS[path.suffix.lower()](read_text(path), path)), path)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of the lines that are not blank. (str.splitlines would also split at form feeds.)"""
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
        if line.strip():
            yield number, line


def _text(text: str, path: Path) -> Iterator[Item]:
    for number, line in _lines(text):
        yield _entry(line, None, number, f"{path}, line {number}")


def _table(text: str, path: Path, **dialect: Any) -> Iterator[Item]:
    """The rows of a table in a dialect of csv.reader."""
    reader = csv.reader(io.StringIO(text, newline=""), **dialect)
    rows = (cells for cells in reader if cells)  # without blank lines
    try:
        names = next(rows, [])
        where = f"{path}, line {reader.line_num}"
        header = [cell.strip().lower() for cell in names]
        prompt, name, category = (
            _column(header, names_of_column, where) for names_of_column in (COLUMNS, IDS, ("category",))
        )
        if prompt is None:
            if header:
                reason = other_separator(header, COLUMNS) or f"no column prompt, caption or text ({_names(names)})"
                raise UsageError(f"{where}: the header has {reason}")
            return
        for number, cells in enumerate(rows, 1):
            where = f"{path}, line {reader.line_num}"
            if len(cells) != len(header):
                raise UsageError(
                    f"{where}: {len(cells)} cells below a header of {len(header)}; give every row one cell per column"
                    + ("" if path.suffix.lower() == ".tsv" else " and quote a prompt with commas")
                )
            entry = _entry(cells[prompt], "" if name is None else cells[name], number, where)
            label = "" if category is None else " ".join(cells[category].split())
            yield replace(entry, category=label[:LONGEST_CATEGORY] or None)
    except csv.Error as e:
        raise UsageError(f"{path}, line {reader.line_num}: cannot read this row ({e}); fix it") from None


def _column(header: list[str], names: tuple[str, ...], where: str) -> int | None:
    """The index in the header of the first of `names` that it has."""
    for name in names:
        if header.count(name) > 1:
            raise UsageError(f"{where}: the header has the column {name} twice; keep one")
        if name in header:
            return header.index(name)
    return None


def _json(text: str, path: Path) -> Iterator[Item]:
    content = parse_json(text, str(path))
    if isinstance(content, dict):
        for number, (name, prompt) in enumerate(content.items(), 1):
            where = f"{path}, id {name[:100]!r}"
            yield _entry(prompt, base.clean(name, where, "id"), number, where)
    elif isinstance(content, list):
        for number, value in enumerate(content, 1):
            yield _value(value, number, f"{path}, entry {number}")
    else:
        raise UsageError(f"{path} must be a JSON list of prompts, or an object of ids and prompts; it is neither")


def _jsonl(text: str, path: Path) -> Iterator[Item]:
    for number, line in _lines(text):
        where = f"{path}, line {number}"
        yield _value(parse_json(line, where), number, where)


def _value(value: object, number: int, where: str) -> Item:
    """An entry of a JSON list: a text, or an object with a text and optionally an id."""
    if not isinstance(value, dict):
        return _entry(value, "", number, where)
    for name in COLUMNS:
        if name in value:
            return _entry(value[name], next((value[key] for key in IDS if key in value), None), number, where)
    raise UsageError(f"{where}: the object has no prompt, caption or text ({_names(value)})")


def _names(names: Iterable[str]) -> str:
    return f"it has: {', '.join(map(repr, names))[:200]}"


def _entry(prompt: object, name: object, number: int, where: str) -> Item:
    """`number` is the id of an entry that has none."""
    if name is None or name == "":
        name = number
    if isinstance(name, float) and name.is_integer():
        name = int(name)  # as pandas writes a column of integers with a gap
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    return Item(number, base.clean(prompt, where), None, base.clean(name, where, "id"))


_READERS: dict[str, Callable[[str, Path], Iterator[Item]]] = {
    ".txt": _text,
    ".tsv": partial(_table, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".csv": partial(_table, strict=True),
    ".json": _json,
    ".jsonl": _jsonl,
}
SUFFIXES = tuple(_READERS)
