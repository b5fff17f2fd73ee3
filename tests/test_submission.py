"""Submitted rows: written by `specbench push to=DIR`, and computed again by scripts/check_submission.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import check_submission
import pytest
from commands import ROOT
from fake_pipeline import FakePipeline

from specbench import cli
from specbench.config import configuration
from specbench.harness import run
from specbench.rows import journal
from specbench.rows.provenance import RunMetadata
from specbench.storage import origin

COMMIT = "a" * 40


def submit(folder: Path, commit: str) -> Path:
    """A folder of one run of a commit, with the seconds and images of a fake pipeline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(origin, "commit", lambda: commit)
        run.run(configuration.compose(["method=sjd", "n=3", "metrics=none"]), folder / "run", loader=FakePipeline)
    assert cli.main(["push", str(folder / "run"), f"to={folder}/submitted"]) == 0
    return folder / "submitted"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return submit(tmp_path_factory.mktemp("submission"), COMMIT)


@pytest.fixture
def submitted(original: Path, tmp_path: Path) -> Path:
    """A copy of a correct folder."""
    return Path(shutil.copytree(original, tmp_path / "submitted"))


def is_known(commit: str) -> bool:
    return commit == COMMIT


def only_file(folder: Path, pattern: str) -> Path:
    [path] = folder.glob(pattern)
    return path


def test_a_row_is_computed_again(submitted: Path) -> None:
    assert check_submission.faults(submitted, is_known) == []
    assert check_submission.faults(submitted) == []  # without a history


def edit_row(folder: Path) -> None:
    path = folder / "rows.csv"
    path.write_text(path.read_text().replace(",3,", ",4,", 1))


def edit_record(folder: Path) -> None:
    """A smaller number of steps, with a matching checksum."""
    path = only_file(folder, "runs/*/records.jsonl")
    first, *rest = path.read_bytes().splitlines(keepends=True)
    values = journal.decode(first)
    values["steps"] -= 1
    path.write_bytes(journal.encode(values).rstrip(b"\n") + b"\n" + b"".join(rest))


def add_row(folder: Path) -> None:
    path = folder / "rows.csv"
    head, row = path.read_text().splitlines()
    run_id = json.loads(only_file(folder, "runs/*/run.json").read_text())["run_id"]
    path.write_text("\n".join([head, row, row.replace(run_id, "another")]) + "\n")


def remove_run(folder: Path) -> None:
    only_file(folder, "runs/*/records.jsonl").unlink()


def edit_config(folder: Path) -> None:
    path = only_file(folder, "runs/*/config.yaml")
    path.write_text(path.read_text().replace("window: 16", "window: 8"))


def link(folder: Path) -> None:
    (folder / "runs" / "link").symlink_to("/etc")


def fill(folder: Path) -> None:
    (folder / "images.bin").write_bytes(bytes(check_submission.LARGEST))


def test_inconsistent_files_are_named(original: Path, tmp_path: Path) -> None:
    for damage in (edit_row, edit_record, add_row, remove_run, edit_config, link, fill):
        folder = Path(shutil.copytree(original, tmp_path / damage.__name__))
        damage(folder)
        problems = check_submission.faults(folder, is_known)
        assert problems, damage
        assert all(problem.count("\n") == 0 for problem in problems)


def test_code_that_nobody_can_read_is_refused(tmp_path: Path) -> None:
    for commit in (COMMIT + "-dirty", "b" * 40, "abc", ""):
        assert len(check_submission.faults(submit(tmp_path / f"of{commit}", commit), is_known)) == 1, commit


def test_plug_ins_are_named(submitted: Path) -> None:
    path = only_file(submitted, "runs/*/run.json")
    memory = RunMetadata.read(path)
    memory.changed(
        sessions={key: {**session, "plugins": "mine 1.0"} for key, session in memory.sessions.items()}
    ).write(path)
    assert any(
        "mine 1.0" in problem and "plug-ins" in problem for problem in check_submission.faults(submitted, is_known)
    )


def test_the_script_checks_every_folder(submitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_submission.main([]) == 2
    assert check_submission.main([str(submitted), str(submitted / "runs")]) == 1
    assert "has no rows.csv" in capsys.readouterr().out


def test_the_submitted_rows_of_this_repository_are_correct() -> None:
    folders = [path for path in sorted((ROOT / "results/submitted").glob("*")) if path.is_dir()]
    assert {path: check_submission.faults(path, check_submission.known_commits()) for path in folders} == {
        path: [] for path in folders
    }
