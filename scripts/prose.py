"""Reports phrases that are hard to read, and what to write instead; scripts/prose.yaml lists both.

python scripts/prose.py [FILE ...]  # every such phrase in these files; without files: in all, where they exceed a limit
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from proselint.checks import archaism, needless_variants, nonwords
from proselint.checks.misc import illogic, pretension
from proselint.registry.checks import Check, Padding
from proselint.registry.checks.types import PreferredForms

ROOT = Path(__file__).resolve().parents[1]
DOCS, SETTINGS, MESSAGES = "README and docs", "settings", "messages"
COMMENTS, NAMES, VARIABLES = "docstrings and comments", "names", "variables called found"
#: Kind of text -> the most phrases in all files together. Lower a limit when fewer are left.
LIMITS = {DOCS: 0, SETTINGS: 0, MESSAGES: 0, COMMENTS: 10, NAMES: 0, VARIABLES: 10}

LISTED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FOREIGN = re.compile("|".join(LISTED["foreign"]))
NEWEST = re.compile(r"\A.*?^## .*?(?=^## )", re.DOTALL | re.MULTILINE)  # the changelog without its older versions
TEXTS = re.compile(r"""#:?(?P<comment>[^\n]*)|[rbfuRBFU]{0,2}("{3}|'{3}|"|')(?P<string>(?:\\.|.)*?)\2""", re.DOTALL)
BREAK = "¦"  # between texts of one kind that do not belong together


class Problem(NamedTuple):
    path: Path
    line: int
    kind: str
    phrase: str
    advice: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.kind}: '{self.phrase}': {self.advice}"


def _check(forms: dict[str, str]) -> Check:
    """A check of phrases: pattern -> plain form, as in prose.yaml."""
    patterns = {
        rf"(?:^|[.:;,({BREAK}]) *(?:{old[1:]})\b" if old[0] == "^" else rf"\b(?:{old})\b": plain
        for old, plain in forms.items()
    }
    patterns = {re.sub(" (?![*])", r"\\s+", pattern): plain for pattern, plain in patterns.items()}
    return Check(PreferredForms(patterns, padding=Padding.RAW), message="write: {0}")


WORDS = _check(LISTED["words"])
STOCK = [
    check for module in (archaism, illogic, needless_variants, nonwords, pretension) for check in module.__register__
]
PROSE = [_check(LISTED["phrases"]), WORDS, *STOCK]
CHECKS = {NAMES: [WORDS], VARIABLES: [_check({"found": "the name of the thing"})]}


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """(kind, text) of a file. A text has the file's line breaks, so that the numbers of its lines are the file's."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        newest = NEWEST.match(text) if path.name == "changelog.md" else None
        yield DOCS, re.sub(r"`[^`\n]*`", "`name`", newest[0] if newest else text)
    elif path.suffix == ".yaml":
        yield SETTINGS, re.sub("(?m)^ *#", "", text)
    else:
        parts = _parts(text)
        if not path.is_relative_to(ROOT / "tests"):
            yield from ((kind, parts[kind]) for kind in (COMMENTS, MESSAGES))
        if path.is_relative_to(ROOT / "specbench"):
            yield NAMES, FOREIGN.sub("", parts[NAMES]).replace("_", " ")
        yield VARIABLES, parts[NAMES]


def _parts(source: str) -> dict[str, str]:
    """Python code in three: docstrings and comments; messages, which are strings with a space; the rest."""
    parts = {COMMENTS: "", MESSAGES: "", NAMES: ""}
    depth = end = 0
    for match in TEXTS.finditer(source):
        code, before = source[end : match.start()], source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
        depth += sum(map(code.count, "([{")) - sum(map(code.count, ")]}"))
        docstring = not depth and not before.strip()
        kind = COMMENTS if match["comment"] is not None or docstring else MESSAGES
        text = match[match.lastgroup or 0]
        height = "\n" * text.count("\n")
        parts[NAMES] += code + BREAK + height
        for name in (COMMENTS, MESSAGES):
            parts[name] += "\n" * code.count("\n") + (BREAK if code.strip() or name != kind else " ")
            parts[name] += text if name == kind and " " in text.strip() else BREAK + height
        end = match.end()
    parts[NAMES] += source[end:]
    return parts


def problems(path: Path) -> list[Problem]:
    """The problems of a file in the order of its lines."""
    matches = []
    for kind, text in texts(path):
        text = FOREIGN.sub("", text)
        for check in CHECKS.get(kind, PROSE):
            for result in check.check_with_flags(text):
                phrase = text[slice(*result.span)].strip(f" \n.:;,({BREAK}")
                line = text.count("\n", 0, text.index(phrase, result.span[0])) + 1
                matches.append(Problem(path, line, kind, " ".join(phrase.split()), result.message))
    return sorted(matches, key=lambda problem: problem.line)


def files() -> list[Path]:
    """The files that are checked."""
    kinds = {"md": ["docs"], "yaml": ["conf", "specbench"], "py": ["specbench", "scripts", "tools", "tests"]}
    paths = [path for kind, folders in kinds.items() for name in folders for path in (ROOT / name).rglob(f"*.{kind}")]
    return [ROOT / "README.md", ROOT / "results/README.md", *sorted(paths)]


def main(*names: str) -> int:
    """Prints the problems of the kinds that exceed their limits, or all of those in the files `names`. 1 if any."""
    matches = [problem for path in map(Path, names or files()) for problem in problems(path.resolve())]
    counts = Counter(problem.kind for problem in matches)
    excess = [problem for problem in matches if names or counts[problem.kind] > LIMITS[problem.kind]]
    for problem in excess:
        print(problem)
    if not names:
        print("phrases:", ", ".join(f"{counts[kind]} in {kind} (limit {limit})" for kind, limit in LIMITS.items()))
    return bool(excess)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
