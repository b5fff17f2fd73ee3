"""The words of docs/glossary.md: one name a concept, one class a name, no file too long to see."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "specbench").rglob("*.py"))
TEXTS = [
    *SOURCES,
    *sorted((ROOT / "conf").rglob("*.yaml")),
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "changelog.md"),
]
#: Names that are not ours: a token of Lumina-mGPT, and columns as older files name them.
FOREIGN = re.compile("end_of_turn|RENAMED_COLUMNS")
#: Words for which the field has another; the part of an identifier between underscores counts as a word.
OLD = re.compile(
    r"(?<![a-z])(laws?|turns?|judged?|judges|shel(f|ves)|heeds?|mends?|mended|anew|amend|likeliest)(?![a-z])",
    re.IGNORECASE,
)
LONGEST = 450  # lines of a file that can be seen as a whole


def test_words_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OLD.search(line) and not FOREIGN.search(line)
    ]
    assert not found, "\n".join(found)


def test_a_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_no_file_is_too_long_without_a_reason() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): len(lines)
        for path in SOURCES
        if len(lines := path.read_text(encoding="utf-8").splitlines()) > LONGEST and "long because" not in lines[0]
    }
    assert not long
