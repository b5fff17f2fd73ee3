"""scripts/prose.py, the part of `make lint` that looks for phrases that are hard to read."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("proselint", reason="proselint is not installed")
import prose

MODULE = '''"""A planted
lack of memory."""

count = 3  # the file
# lies in a folder, and a line may go
#: on and on
print(f"{count} images are told "
      "from others", "lacks", "told", "stands well")


def found(judge: int) -> int:
    """As of `found`."""
    return judge  # what is left
'''


def _reported(tmp_path: Path, name: str, text: str) -> list[tuple[int, str, str]]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return [(problem.line, problem.kind, problem.phrase) for problem in prose.problems(path)]


def test_planted_phrases_are_reported_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "specbench").mkdir()
    assert _reported(tmp_path, "specbench/module.py", MODULE) == [
        (2, prose.COMMENTS, "lack"),
        (4, prose.COMMENTS, "file lies"),
        (5, prose.COMMENTS, "lies in"),
        (5, prose.COMMENTS, "go on"),
        (7, prose.MESSAGES, "are told from"),
        (11, prose.NAMES, "judge"),
        (11, prose.VARIABLES, "found"),
        (12, prose.COMMENTS, "As of `"),
        (13, prose.COMMENTS, "what is"),
        (13, prose.NAMES, "judge"),
    ]
    assert _reported(tmp_path, "page.md", "A is faster than that of B.\nThe seconds\nare those of A.\n") == [
        (3, prose.DOCS, "are those of")
    ]
    assert _reported(tmp_path, "settings.yaml", "a: 1  # SJD saves 4.88 times\n      # fewer steps\n") == [
        (1, prose.SETTINGS, "4.88 times fewer")
    ]


def test_older_versions_in_the_changelog_stay(tmp_path: Path) -> None:
    text = "# Changelog\n\n## Unreleased\n\n- It goes on.\n\n## 0.1\n\n- It goes on.\n"
    assert _reported(tmp_path, "changelog.md", text) == [(5, prose.DOCS, "goes on")]


def test_the_command_names_file_line_phrase_and_the_plain_form(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page = tmp_path / "page.md"
    page.write_text("All is well.\n", encoding="utf-8")
    assert prose.main(str(page)) == 0
    page.write_text("All is well.\nA run goes on.\n", encoding="utf-8")
    assert prose.main(str(page)) == 1
    assert capsys.readouterr().out == f"{page}:2: README and docs: 'goes on': write: continues\n"


def test_no_kind_of_text_exceeds_its_limit() -> None:
    assert prose.main() == 0
