"""The package: the entry point, the data files, the pinned versions, and the Makefile's targets."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import test_time
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from specbench.storage.package import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {
    name: [Requirement(r) for r in wanted] for name, wanted in PROJECT["project"]["optional-dependencies"].items()
}
BASE = [Requirement(r) for r in PROJECT["project"]["dependencies"]]

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")


def _pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = [line.split("==") for line in lines]
    assert all(len(pin) == 2 for pin in pins), "only name==version lines"
    return {canonicalize_name(name): Version(version) for name, version in pins}


def test_wheel_and_sdist_work_without_a_checkout() -> None:
    """As the build lists them: every data file that git does not ignore."""
    wheel = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    data = {file for part in ("specbench", "conf") for file in (ROOT / part).rglob("*") if file.is_file()}
    names = {file.relative_to(ROOT).as_posix() for file in data if file.suffix not in (".py", ".pyc")}
    assert {f"specbench/{name.removeprefix('specbench/')}" for name in names} <= wheel
    for kind, least in {".yaml": 100, ".safetensors": 13, ".csv": 20, ".html": 1}.items():
        assert len([name for name in wheel if name.endswith(kind)]) >= least, kind
    assert {name.split("/")[0] for name in wheel} == {"specbench"}
    leftovers = {"__pycache__", "build", "dist", "results", "runs", "tests"}
    assert [name for name in wheel if leftovers & set(name.split("/"))] == []
    sdist = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    top = {
        "README.md",
        "LICENSE",
        "Makefile",
        "CITATION.cff",
        "constraints.txt",
        "docs/changelog.md",
        "scripts/smoke.sh",
        "tools/scenes/stages.py",
    }
    assert top | {"tests/project/test_packaging.py", "conf/config.yaml"} <= sdist
    assert {name.removeprefix("specbench/") for name in wheel if name.startswith("specbench/conf/")} <= sdist
    assert {name for name in wheel if not name.startswith("specbench/conf/")} <= sdist
    others = [name for name in sdist if not name.startswith("docs/templates/")]
    assert [name for name in others if leftovers - {"tests"} & set(name.split("/"))] == []


def test_the_distribution_has_its_own_name_and_the_command_the_project_s(tmp_path: Path) -> None:
    """The index has a specbench of another field. Our instructions must not install it."""
    wheel = Path(next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])))
    assert wheel.name == f"specbench_image-{__version__}-py3-none-any.whl"
    [distribution] = importlib.metadata.distributions(path=[str(wheel)])
    assert distribution.metadata["Name"] == PROJECT["project"]["name"] == "specbench-image"
    assert [(entry.name, entry.value) for entry in distribution.entry_points] == [("specbench", "specbench.cli:main")]
    assert set(distribution.metadata.get_all("Provides-Extra")) == set(EXTRAS)
    assert distribution.metadata["License-Expression"] == "MIT"
    assert [file.name for file in distribution.files or () if "licenses" in file.parts] == ["LICENSE"]


def test_instructions_install_this_package_with_existing_extras_in_one_form() -> None:
    """In every file that can tell a reader what to install."""
    folders = ("specbench", "scripts", "tools", "docs", "conf", "tests")
    kinds = (".py", ".sh", ".md", ".yaml", ".html")
    match = [p for name in folders for p in (ROOT / name).rglob("*") if p.suffix in kinds]
    top = [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", ".ci/run")]
    texts = {str(p.relative_to(ROOT)): p.read_text() for p in (*match, *top) if p != Path(__file__) and p.exists()}
    stranger = re.compile(r"pip3? install .*\bspecbench\b(?!-image)|\bspecbench\[(?!-)")
    assert [name for name, text in texts.items() if stranger.search(text)] == []
    named = {extra for text in texts.values() for extra in re.findall(r"\binstall\([\"']([\w-]+)[\"']\)", text)}
    assert named >= {"metrics", "ray", "train", "image-reward"}
    written = {match for text in texts.values() for match in re.findall(r"pip install .*?'\.\[([\w-]+)\]'", text)}
    assert named | written <= set(EXTRAS)
    forms = {form for text in texts.values() for form in re.findall(r"(.{0,40}) '\.\[[\w-]+\]'", text)}
    assert {form[-len("uv pip install -e") :] for form in forms} == {"uv pip install -e"}


def test_pinned_versions_fit_their_ranges() -> None:
    pins = _pins()
    for extra in ["", *(name for name in EXTRAS if name != "image-reward")]:
        for expected in EXTRAS[extra] if extra else BASE:
            pinned = pins.get(canonicalize_name(expected.name))
            if extra in ("", "dev"):  # the extras that `make run` and `make test` install
                assert pinned, f"{expected.name} is not pinned"
            assert pinned is None or expected.specifier.contains(pinned), f"{expected} does not allow {pinned}"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that set-up reads, in a folder with a space in its name."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def _make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("ARGS", "PYTHON", "WORKERS", "MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", *arguments], cwd=folder, env=env, capture_output=True, text=True)


@needs_make
def test_make_lists_every_target_with_a_description(clone: Path) -> None:
    lines = _make(clone).stdout.splitlines()
    listed = [line.split()[1] for line in lines]
    targets = (
        "bench check-pages clean docs evidence format gpu help lint mutants pages run tables test test-image-reward"
    )
    assert sorted(listed) == [*targets.split(), "train-fashion", "train-scenes", "train-textures"]
    assert all(len(line.split()) > 3 for line in lines)


def test_make_test_reports_the_slowest_tests() -> None:
    cases = [("test_run", 4.0), ("test_run", 3.5), ("test_audit", 30.0), *((f"test_{i}", 0.1) for i in range(9))]
    xml = "".join(f'<testcase classname="tests.{name}" name="any" time="{spent}"/>' for name, spent in cases)
    *slow, line = test_time.summary(f'<testsuites><testsuite time="20.2">{xml}</testsuite></testsuites>', 25.0).split(
        "\n"
    )
    assert [text.split() for text in slow[:3]] == [
        ["30.0", "s", "tests.test_audit::any"],
        ["4.0", "s", "tests.test_run::any"],
        ["3.5", "s", "tests.test_run::any"],
    ]
    assert len(slow) == 10
    assert [int(x) for x in re.findall(r" (\d+)\b", line)] == [25, 5, 20, 38, 30, 8, 0, 0, 0]
    assert line.index("test_audit 30") < line.index("test_run 8")


@needs_make
@pytest.mark.parametrize("code", [0, 1])
def test_make_test_reports_its_time_and_fails_with_its_tests(clone: Path, code: int) -> None:
    """In an environment whose programs do nothing, except that pytest writes a report."""
    xml = '<testsuites><testsuite time="3.2"><testcase classname="tests.test_a" time="3"/></testsuite></testsuites>'
    pytest_ = (
        f'case "$*" in *pytest*) echo \'{xml}\' > build/tests.xml; exit {code};; esac; exec "{sys.executable}" "$@"'
    )
    nothing = ("scripts/browser.sh", ".venv/bin/ruff", ".venv/bin/mypy")
    programs = {**dict.fromkeys(nothing, ""), ".venv/bin/python": pytest_}
    for folder in ("scripts", "build", ".venv/bin"):
        (clone / folder).mkdir(parents=True)
    for name, text in programs.items():
        (clone / name).write_text(f"#!/bin/sh\n{text}\n")
        (clone / name).chmod(0o755)
    shutil.copy(ROOT / "scripts/test_time.py", clone / "scripts")
    (clone / ".venv/.ready-dev").touch()
    process = _make(clone, "test")
    assert (process.returncode != 0) == (code != 0), process.stderr
    assert "tests 3;" in process.stdout
    assert "test_a 3" in process.stdout


@needs_make
def test_an_unsuitable_python_is_a_short_error(clone: Path) -> None:
    path = clone / "my python"
    for python in ("missing", "old"):
        if python == "old":
            path.write_text("#!/bin/sh\nexit 1\n")
            path.chmod(0o755)
        process = _make(clone, "run", f"PYTHON={path}")
        assert process.returncode != 0, python
        sentences = [line for line in process.stderr.splitlines() if not line.startswith("make: ***")]
        assert len(sentences) == 1
        assert all(name in sentences[0] for name in (str(path), "Python 3.11", "PYTHON=")), sentences
        assert not (clone / ".venv/.ready").exists(), python


@needs_make
def test_set_up_is_repeated_only_when_its_inputs_change(clone: Path) -> None:
    def sets_up(target: str) -> bool:
        return "uv" in _make(clone, "--dry-run", target).stdout

    assert sets_up("run")
    assert sets_up("test")
    (clone / ".venv").mkdir()
    (clone / ".venv/.ready").touch()
    assert not sets_up("run")
    assert not sets_up("tables")
    assert sets_up("test")  # it needs the dev extra
    (clone / ".venv/.ready-dev").touch()
    assert not sets_up("test")
    for name in ("pyproject.toml", "constraints.txt"):
        later = (clone / ".venv/.ready").stat().st_mtime + 10
        os.utime(clone / name, (later, later))
        assert sets_up("run")
        os.utime(clone / name, (0, 0))
        assert not sets_up("run")


@needs_make
def test_make_run_forwards_its_arguments(clone: Path) -> None:
    """A repeated parameter would be an error, so ARGS replaces the default."""
    for arguments, run in [
        ("", "method=cool_sd delta=1.1 n=16"),
        ("n=4", "method=cool_sd delta=1.1 n=4"),
        ("delta=2 seed=1", "method=cool_sd n=16 delta=2 seed=1"),
        ("method=eagle1", "method=eagle1"),
        ("-m experiment=coolsd_delta", "-m experiment=coolsd_delta"),
    ]:
        last = _make(clone, "--dry-run", "run", f"ARGS={arguments}").stdout.splitlines()[-1]
        assert last.split() == ['".venv/bin/specbench"', "run", *run.split()], arguments
